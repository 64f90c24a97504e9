"""Stages in worker processes, the links to them, and the protocol in between. ::

    RemoteStage ──► RemoteLink ──► WorkerSupervisor ──► Channel ──► WorkerLoop ──► StageWorkers
                    attempts       starts, restarts     shared       one process,   one per
                                   (by a fork server)   memory       by turns       stage

Messages are typed and versioned, tensors are in shared memory, and nothing is unpickled.
Imports stages and stages.worker, never omni.
"""
