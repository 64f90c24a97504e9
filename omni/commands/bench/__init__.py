"""Load generator for pipelines and servers, and reports of its measurements, for ``omni bench``.

Imports the runtime and its dependencies; servers are measured over HTTP, so nothing of
``omni.server`` is imported. HTTP and plots need the extra ``bench``.
"""
