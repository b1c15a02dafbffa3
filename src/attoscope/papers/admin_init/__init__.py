"""Admin: all claims, of output change with depth, of dependency on branches, and of folding."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.admin_init import closed_forms as closed_forms
from attoscope.papers.admin_init import change as change
from attoscope.papers.admin_init import dependency as dependency
from attoscope.papers.admin_init import folding as folding
from attoscope.papers.admin_init import training as training
from attoscope.papers.admin_init._paper import PAPER as PAPER
