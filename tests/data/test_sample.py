"""The records of a step stay light, and a completion has one log-probability and one version per token."""

import subprocess
import sys

import numpy as np
import pytest

from megarl.data.sample import Completion, Sample


def test_records_need_only_numpy():
    heavy = "{'torch', 'transformers', 'datasets', 'ray', 'pydantic'}"
    code = f"import sys, megarl.data.sample; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_a_completion_has_one_log_probability_and_one_version_per_token():
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="3 token ids but 2 logprobs"):
        Completion(ids, np.zeros(2, dtype=np.float32), "stop", np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="3 token ids but 1 versions"):
        Completion(ids, np.zeros(3, dtype=np.float32), "stop", np.zeros(1, dtype=np.int64))
    completion = Completion(ids, np.zeros(3, dtype=np.float32), "stop", np.array([4, 5, 5]))
    assert (completion.first_version, completion.last_version) == (4, 5)
    assert Sample(0, np.arange(4, dtype=np.int32), completion).num_tokens == 7
