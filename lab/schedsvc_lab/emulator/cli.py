"""Defines the command `schedsvc emulate`."""

import inspect
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from schedsvc.text.option_types import FiniteRange, WholeRange, check_file
from schedsvc_lab.emulator.app import Emulator, Layer
from schedsvc_lab.emulator.counts import CountsFile
from schedsvc_lab.emulator.replay_cli import replay
from schedsvc_lab.emulator.server import Address, Listening, StartError, run
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.emulator.tokenizer import TextTokenizer
from schedsvc_lab.engine import EngineConfig, Profile, ProfileError, load_profile, profile_names
from schedsvc_lab.engine.config import Prefill

# The flag that sets a field of the engine's configuration.
_FLAGS = {
    "blocks": "--kv-tokens",
    "block_size_tokens": "--block-size",
    "sequences_max": "--max-num-seqs",
    "step_tokens_max": "--max-num-batched-tokens",
    "context_tokens_max": "--max-model-len",
}
_SIZE = WholeRange(1, 1 << 40)

_EPILOG = """\b
Examples:
  schedsvc emulate --port 8000 --profile tiny-cpu
  schedsvc emulate --trace mooncake.jsonl --enable-prefix-caching --speed 10
  SCHEDSVC_TARGET=unix:/run/schedsvc/schedsvc.sock \\
    schedsvc emulate --port 8000 --middleware schedsvc_vllm.gate.Gate
"""


@click.command(epilog=_EPILOG, context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    type=WholeRange(0, 65535),
    metavar="PORT",
    help="Port; 0 takes any free one.",
)
@click.option("--uds", metavar="PATH", help="Listen on this Unix socket instead of host and port.")
@click.option(
    "--profile",
    "profile_name",
    default="a10g-llama2-7b",
    metavar="NAME",
    help=f"Costs and capacity of the engine: {', '.join(profile_names())}, or a .yaml file.",
)
@click.option("--kv-tokens", type=_SIZE, help="KV cache in tokens.  [default: the profile's]")
@click.option("--block-size", type=_SIZE, help="Tokens of a KV block.  [default: the profile's]")
@click.option(
    "--max-num-seqs",
    type=WholeRange(1, 1 << 16),
    help="Most sequences in a step.  [default: the profile's]",
)
@click.option(
    "--max-num-batched-tokens", type=_SIZE, help="Most tokens in a step.  [default: the profile's]"
)
@click.option(
    "--max-model-len",
    type=_SIZE,
    help="Context: most tokens of prompt and output.  [default: the profile's]",
)
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    help="Order of the engine's own queue.  [default: the profile's]",
)
@click.option(
    "--enable-chunked-prefill/--no-enable-chunked-prefill",
    "chunked",
    default=None,
    help="Cut prompts to the step's tokens, or do not.  [default: the profile's]",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=None,
    help="Find blocks of earlier prompts again, or do not; the least recently used goes first.  "
    "[default: the profile's]",
)
@click.option("--model", default="emulated", metavar="NAME", help="Name of the model it serves.")
@click.option(
    "--tokenizer",
    "tokenizer_path",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR",
    help="Count with the tokenizer and chat template in this folder, as the model's server would."
    "  [default: about four letters a token]",
)
@click.option(
    "--middleware",
    multiple=True,
    metavar="CLASS",
    help="A pure ASGI class, package.module.Class, put around the server as by vLLM. Repeatable; "
    "the last one is the outermost.",
)
@click.option(
    "--speed",
    default=1.0,
    type=FiniteRange(0, 10_000, min_open=True),
    help="Multiply the speed of the profile by this factor.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Serve no clients: replay this trace inside the emulator, print the result, and exit.",
)
@click.option("--json", "as_json", is_flag=True, help="With --trace: print the result as JSON.")
@click.option(
    "--counts",
    "counts_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append each request's tokens to this file as JSON, before each part of its answer.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the address here, as JSON, when the server listens; removed at its end.",
)
def emulate(
    host: str,
    port: int,
    uds: str | None,
    profile_name: str,
    model: str,
    tokenizer_path: Path | None,
    middleware: tuple[str, ...],
    speed: float,
    trace_file: Path | None,
    as_json: bool,
    counts_file: Path | None,
    ready_file: Path | None,
    **sizes: Any,
) -> None:
    """Serve an emulated LLM engine behind an OpenAI-compatible API, without a GPU.

    The engine batches continuously over a real KV-block budget, with preemption, at the speed of
    a cost profile. Answers are pseudo-words. It prints one line when it is ready, and stops on
    SIGTERM or Ctrl-C.
    """
    settings = _settings(profile_name, model, speed, sizes)
    if tokenizer_path is not None:
        settings = replace(settings, tokenizer=_tokenizer(tokenizer_path))
    if trace_file is not None:
        if middleware or counts_file or ready_file is not None or uds is not None:
            raise click.UsageError(
                "--trace: serves no clients; leave out --middleware, --counts and addresses"
            )
        replay(settings, trace_file, as_json)
        return
    if ready_file is not None:
        check_file(ready_file, "--ready-file")
    layers = [load_layer(path) for path in middleware]
    emulator = Emulator(settings, layers, _counts(counts_file))
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)

    def ready(listening: Listening) -> None:
        if ready_file is not None:
            listening.write(ready_file)
        click.echo(f"emulator ready {listening}")

    try:
        run(emulator, Address(host, port, uds), ready)
    except StartError as error:
        raise click.ClickException(str(error)) from error
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def load_layer(path: str) -> Layer:
    """Import the class that `--middleware` names. Raises click.UsageError."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise click.UsageError(f"--middleware {path}: must be package.module.Class")
    try:
        layer = getattr(import_module(module_name), name)
    except ImportError as error:
        raise click.UsageError(f"--middleware {path}: cannot import: {error}") from error
    except AttributeError:
        raise click.UsageError(f"--middleware {path}: {module_name} has no {name}") from None
    # Every class is `callable()`; what counts is a call of its instances.
    if not inspect.isclass(layer) or not any("__call__" in vars(base) for base in layer.__mro__):
        raise click.UsageError(
            f"--middleware {path}: must be a class whose instances are ASGI applications; a "
            "function would hide from the server that a client has left"
        )
    return cast(Layer, layer)


def _counts(path: Path | None) -> CountsFile | None:
    if path is None:
        return None
    check_file(path, "--counts")
    return CountsFile(path)


def _tokenizer(path: Path) -> TextTokenizer:
    # Takes a moment to import, which only this needs.
    from schedsvc_lab.workload.tokenizers import ModelTokenizer

    try:
        return ModelTokenizer.load(path)
    except ValueError as error:
        raise click.UsageError(f"--tokenizer: {error}") from error


def _settings(
    profile_name: str, model: str, speed: float, sizes: dict[str, Any]
) -> EmulatorSettings:
    if not model:
        raise click.UsageError("--model: must not be empty")
    try:
        profile = load_profile(profile_name)
    except ProfileError as error:
        raise click.UsageError(f"--profile: {error}") from error
    return EmulatorSettings(profile, _config(profile, sizes), model, speed)


def _config(profile: Profile, sizes: dict[str, Any]) -> EngineConfig:
    chunked, caching = sizes["chunked"], sizes["prefix_caching"]
    block, tokens = sizes["block_size"] or profile.engine.block_size_tokens, sizes["kv_tokens"]
    if tokens is not None and tokens < block:
        raise click.UsageError(
            f"--kv-tokens: {tokens} is less than one block of {block} tokens (--block-size);"
            f" give at least {block}"
        )
    prefill: Prefill | None = None if chunked is None else "chunked" if chunked else "whole"
    try:
        return profile.config(
            kv_tokens=sizes["kv_tokens"],
            block_size_tokens=sizes["block_size"],
            sequences_max=sizes["max_num_seqs"],
            step_tokens_max=sizes["max_num_batched_tokens"],
            context_tokens_max=sizes["max_model_len"],
            policy=sizes["scheduling_policy"],
            prefill=prefill,
            prefix_cache=None if caching is None else "lru" if caching else "off",
        )
    except ValueError as error:
        raise click.UsageError(_with_flags(str(error))) from error


def _with_flags(message: str) -> str:
    """Name flags where the engine's configuration names its fields; "62 blocks" are no field."""
    message = re.sub(r"^blocks:", f"{_FLAGS['blocks']}:", message)
    others = "|".join(field for field in _FLAGS if field != "blocks")
    return re.sub(rf"\b({others})\b", lambda found: _FLAGS[found[0]], message)
