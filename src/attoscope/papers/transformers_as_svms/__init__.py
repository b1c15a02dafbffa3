"""Training one attention layer solves a hard-margin SVM over pairs of tokens: all claims."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.transformers_as_svms import local_convergence as local_convergence
from attoscope.papers.transformers_as_svms import global_paths as global_paths
from attoscope.papers.transformers_as_svms import rank as rank
from attoscope.papers.transformers_as_svms import overparameterisation as overparameterisation
from attoscope.papers.transformers_as_svms import feasibility as feasibility
from attoscope.papers.transformers_as_svms import nonlinear as nonlinear
from attoscope.papers.transformers_as_svms import sparsemax as sparsemax
from attoscope.papers.transformers_as_svms import paths as paths
from attoscope.papers.transformers_as_svms import certificate as certificate
from attoscope.papers.transformers_as_svms import cone as cone
from attoscope.papers.transformers_as_svms import causal as causal
from attoscope.papers.transformers_as_svms._paper import PAPER as PAPER
