"""The verbs of the command line: each module has `main(arguments) -> status`."""
