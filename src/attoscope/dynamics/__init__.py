"""Attention trained as the theory trains it.

One attention layer, `f_i = h(sum_t s_it x_it)` with `s_i = softmax(X_i W z_i)` and a fixed head h,
is trained on W (or on K and Q with `W = K Q^T`) alone. Its loss has no finite minimum: W grows
without bound, and its direction is that of an attention SVM (`attoscope.svm`), which separates the
one token that each sample attends to from all its others.

    >>> import numpy as np
    >>> from attoscope.dynamics import AttentionData, LinearHead, Normalised, train
    >>> from attoscope.svm import AttentionSVM
    >>> tokens = [[[[1, 0], [0, 0]], [[0, 1], [0, 0]]]]  # (trial, sequence, token, width)
    >>> queries = [[[1, 0], [0.5, 0.75**0.5]]]  # (trial, sample, width): 60 degrees apart
    >>> data = AttentionData.cross(tokens, queries, [[1, 1]], LinearHead([[1, 3]]))
    >>> run = train(data, Normalised(lr=0.1), 3000)
    >>> run.selected()
    array([[0, 0]])
    >>> svm = AttentionSVM().fit_selection(run.selection(trial=0))
    >>> bool(run.correlation(svm.weight_[None])[-1, 0] > 0.9999)
    True

Arrays are float64 and carry a leading trial axis: many trials are trained side by side.

- `AttentionData`: tokens, queries, labels and a head (`LinearHead`, `ReluHead`, `LambdaHead`).
- `train` with a rule (`GradientDescent`, `Normalised`, `Polyak`, `Steepest`, `Adam`, `Mirror`)
  gives a `Trajectory`: weights, probabilities, what is selected, a certificate without a solver.
- `regularisation_path`: the same limit by minimisation on balls that grow.
- `locally_optimal`, `local_cone`, `first_gradient_separates`, `all_tokens_support`,
  `equal_scores`: where training can go, and when it goes to the best tokens.
- `LayerMonitor`: a torch layer that somebody else is training, against its own SVM.

Source: arXiv 2308.16898 and the papers around it.
"""

from attoscope.dynamics.certificate import training_certificate as training_certificate
from attoscope.dynamics.data import AttentionData as AttentionData
from attoscope.dynamics.gradients import Gradient as Gradient
from attoscope.dynamics.gradients import gradient as gradient
from attoscope.dynamics.heads import Head as Head
from attoscope.dynamics.heads import LambdaHead as LambdaHead
from attoscope.dynamics.heads import LinearHead as LinearHead
from attoscope.dynamics.heads import ReluHead as ReluHead
from attoscope.dynamics.heads import sparsemax as sparsemax
from attoscope.dynamics.losses import loss_value as loss_value
from attoscope.dynamics.monitor import LayerMonitor as LayerMonitor
from attoscope.dynamics.monitor import Look as Look
from attoscope.dynamics.monitor import head_weight as head_weight
from attoscope.dynamics.optimality import Condition as Condition
from attoscope.dynamics.optimality import LocalCone as LocalCone
from attoscope.dynamics.optimality import LocalOptimality as LocalOptimality
from attoscope.dynamics.optimality import all_tokens_support as all_tokens_support
from attoscope.dynamics.optimality import equal_scores as equal_scores
from attoscope.dynamics.optimality import first_gradient_separates as first_gradient_separates
from attoscope.dynamics.optimality import local_cone as local_cone
from attoscope.dynamics.optimality import locally_optimal as locally_optimal
from attoscope.dynamics.path import RegularisationPath as RegularisationPath
from attoscope.dynamics.path import regularisation_path as regularisation_path
from attoscope.dynamics.rules import Adam as Adam
from attoscope.dynamics.rules import Descent as Descent
from attoscope.dynamics.rules import GradientDescent as GradientDescent
from attoscope.dynamics.rules import Mirror as Mirror
from attoscope.dynamics.rules import Normalised as Normalised
from attoscope.dynamics.rules import Polyak as Polyak
from attoscope.dynamics.rules import Rule as Rule
from attoscope.dynamics.rules import Steepest as Steepest
from attoscope.dynamics.rules import steepest as steepest
from attoscope.dynamics.training import train as train
from attoscope.dynamics.trajectory import Trajectory as Trajectory
from attoscope.dynamics.weights import balance as balance
from attoscope.dynamics.weights import correlation as correlation
from attoscope.dynamics.weights import nuclear_gap as nuclear_gap
