"""Training watched: cheap readings of attention, stream and gradients every k steps, and alarms.

`attoscope.monitor.callback.TrainerCallback` (for `transformers.Trainer`) is imported on its own,
so that a plain torch loop needs no transformers.
"""

from attoscope.monitor.alarms import JUMPS as JUMPS
from attoscope.monitor.alarms import LIMITS as LIMITS
from attoscope.monitor.alarms import Alarm as Alarm
from attoscope.monitor.table import Table as Table
from attoscope.monitor.watching import Log as Log
from attoscope.monitor.watching import watch as watch
