"""The interfaces of models over packed tokens, and the families that implement them, by folder.

The interfaces import inputs, layers and the packages below; families import the interfaces;
``registry`` has the table of families and imports them all, and ``model_loader`` imports the table.
"""
