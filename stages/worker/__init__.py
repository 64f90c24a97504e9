"""One stage's worker: driven by commands, emitting events; knows no other stage and no pipeline.

Imports engine and stages.
"""
