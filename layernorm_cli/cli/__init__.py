"""One file per command: parse, do the task, report. The shared options are in options.py."""
