"""How well a model in few bits does: measured against a reference, and made better by calibration."""
