"""The stages: one module each, with a frozen Config and run(config, ...)."""
