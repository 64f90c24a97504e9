"""The command line. Imports every other subpackage."""
