"""Where host and device meet: submit, step, stream."""
