"""The trace: load a model, run it, and watch what passes each layer's attention and residual."""

from attoscope.trace.batches import batches as batches
from attoscope.trace.counts import Counts as Counts
from attoscope.trace.layout import Layout as Layout
from attoscope.trace.layout import Stack as Stack
from attoscope.trace.memory import PeakBytes as PeakBytes
from attoscope.trace.memory import parameter_count as parameter_count
from attoscope.trace.rows import Rows as Rows
from attoscope.trace.rows import attention_rows as attention_rows
from attoscope.trace.rows import row_blocks as row_blocks
from attoscope.trace.selections import HeadSelection as HeadSelection
from attoscope.trace.selections import head_selections as head_selections
from attoscope.trace.shuffle import shuffled as shuffled
from attoscope.trace.subject import Subject as Subject
from attoscope.trace.subject import subject_of as subject_of
from attoscope.trace.types import AttentionCall as AttentionCall
from attoscope.trace.types import Batch as Batch
from attoscope.trace.types import Layer as Layer
from attoscope.trace.types import Site as Site
from attoscope.trace.watch import watch as watch
