"""One file per phenomenon: what it reads, its null, its rules for findings."""
