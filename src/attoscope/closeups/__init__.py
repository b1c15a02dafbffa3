"""The way down to the text: rows that show findings, and one row of every head."""

from attoscope.closeups.pick import closeups as closeups
