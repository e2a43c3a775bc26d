"""The stages of a run, one module each; `stage` says what a stage is."""
