"""One file per command: does the work, returns a result record, prints nothing."""
