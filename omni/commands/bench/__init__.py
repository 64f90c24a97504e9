"""Load on a pipeline or on a server, and a report of its figures. ``omni bench`` runs it.

Imports the runtime and what that imports; a server is measured over HTTP, so nothing of
``omni.server``. HTTP and plots need the extra ``bench``.
"""
