"""Setting the Record Straight on Transformer Oversmoothing: all claims."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.oversmoothing_record_straight import regimes as regimes
from attoscope.papers.oversmoothing_record_straight import threshold as threshold
from attoscope.papers.oversmoothing_record_straight import predictor as predictor
from attoscope.papers.oversmoothing_record_straight import untrained as untrained
from attoscope.papers.oversmoothing_record_straight import trained as trained
from attoscope.papers.oversmoothing_record_straight._paper import PAPER as PAPER
