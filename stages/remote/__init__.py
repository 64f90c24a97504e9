"""Stages in workers: their processes, the links to them, and what crosses in between. ::

    RemoteStage ──► RemoteLink ──► WorkerSupervisor ──► Channel ──► WorkerLoop ──► StageWorkers
                    attempts       starts, restarts     shared       one process,   one for each
                                   (by a fork server)   memory       by turns       stage

Messages are typed and carry a version, tensors are in shared memory, and nothing is unpickled.
Imports stages and what drives them, never omni.
"""
