"""Worker of one stage: executes commands and emits events; knows no other stage and no pipeline.

Imports engine and stages.
"""
