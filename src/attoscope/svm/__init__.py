"""The heart: what attention could select. The attention SVM, exact and certified.

Knows nothing of models: arrays in, arrays out.
"""

from attoscope.svm.certificate import Certificate as Certificate
from attoscope.svm.certificate import certify as certify
from attoscope.svm.equalities import finite_part as finite_part
from attoscope.svm.estimator import AttentionSVM as AttentionSVM
from attoscope.svm.feasible import Feasibility as Feasibility
from attoscope.svm.feasible import cover_count as cover_count
from attoscope.svm.feasible import feasibility as feasibility
from attoscope.svm.fingerprints import Fingerprint as Fingerprint
from attoscope.svm.fingerprints import fingerprint as fingerprint
from attoscope.svm.graphs import GraphSVM as GraphSVM
from attoscope.svm.graphs import TokenGraph as TokenGraph
from attoscope.svm.graphs import context_markov as context_markov
from attoscope.svm.graphs import graph_svm as graph_svm
from attoscope.svm.graphs import soft_component as soft_component
from attoscope.svm.graphs import token_priority_graph as token_priority_graph
from attoscope.svm.infeasible import Farkas as Farkas
from attoscope.svm.infeasible import InfeasibleSelection as InfeasibleSelection
from attoscope.svm.many import fit_many as fit_many
from attoscope.svm.norms import Entrywise as Entrywise
from attoscope.svm.norms import Norm as Norm
from attoscope.svm.norms import Schatten as Schatten
from attoscope.svm.selection import Selection as Selection
