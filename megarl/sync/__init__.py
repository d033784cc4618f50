"""Weight sync: replays a reshard plan over a transport, from trainer ranks to rollout workers.

Trainer ranks use `publish.WeightSync`, rollout workers `read.StreamReader`; a `manifest.WeightManifest` says to the workers
what comes.
"""
