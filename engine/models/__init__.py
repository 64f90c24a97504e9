"""The contracts of models over packed tokens, and the families that keep them, one folder each.

The contracts import inputs, layers and the rooms below; families import the contracts; the table of
families stands above them all, in ``registry``, and ``model_loader`` above the table.
"""
