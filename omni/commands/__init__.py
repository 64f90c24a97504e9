"""The command line. Imports every other room."""
