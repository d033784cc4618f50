"""Weight sync: replays a reshard plan over a transport, from trainer ranks to rollout workers.

Trainer ranks use `WeightSync`, rollout workers `ShardReader`; a `WeightManifest` travels between them.
"""

from megarl.sync.manifest import SyncError, WeightManifest
from megarl.sync.publish import WeightSync
from megarl.sync.read import ShardReader

__all__ = ["ShardReader", "SyncError", "WeightManifest", "WeightSync"]
