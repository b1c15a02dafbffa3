"""Gradient descent dynamics of Transformers: where each kernel stops, and how fast it goes."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.gd_dynamics import trap as trap
from attoscope.papers.gd_dynamics import queries as queries
from attoscope.papers.gd_dynamics import rates as rates
from attoscope.papers.gd_dynamics import ordering as ordering
from attoscope.papers.gd_dynamics import slices as slices
from attoscope.papers.gd_dynamics._paper import PAPER as PAPER
