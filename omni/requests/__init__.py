"""Reading of request files and writing of output files. Imports stages, engine."""
