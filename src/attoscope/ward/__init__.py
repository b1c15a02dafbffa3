"""Ways to break a model on purpose, to see whether the diagnosis finds what was broken."""

from attoscope.ward.faults import FAULTS as FAULTS
from attoscope.ward.faults import Fault as Fault
from attoscope.ward.faults import broken as broken
