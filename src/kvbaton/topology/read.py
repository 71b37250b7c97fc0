"""Reads topology files."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from kvbaton.errors import ConfigurationError
from kvbaton.layout import TOKEN
from kvbaton.topology.components import check_dtype, read_model
from kvbaton.topology.convert import convert
from kvbaton.topology.huggingface import read_config
from kvbaton.topology.layers import parse_layers
from kvbaton.topology.model import Model
from kvbaton.topology.parse import check_values, parse_json, parse_yaml, printable, shown
from kvbaton.topology.presets import PRESETS
from kvbaton.topology.ranks import Layouting, Topology
from kvbaton.topology.spec import ContextSpec, OverrideSpec, ScaleSpec, TopologySpec

MAX_RANKS = 1024
"""Ranks that a side may have."""


def load_topology(path: str | Path) -> Topology:
    """Read a topology file (YAML, or JSON, which is YAML too). Paths in it are relative to its folder.

    Raises `ConfigurationError`, one line that begins with the file, for what cannot be read or does not fit.
    """
    path = Path(path)
    return read_topology(parse_yaml(path), str(path), path.parent)


def read_topology(value: object, where: str = "topology", folder: Path = Path()) -> Topology:
    """The topology that ``value``, a parsed file, describes. ``where`` begins errors; ``folder`` is for its paths.

    Raises `ConfigurationError`.
    """
    check_values(value, where)
    spec = convert(value, TopologySpec, where)
    model = _model(spec.model, f"{where}: model", folder)
    if spec.dtype:
        check_dtype(spec.dtype, f"{where}: dtype")
    layouting = {
        component.name: Layouting(
            _page_size(component.page_size or spec.page_size, component), spec.order, spec.placement
        )
        for component in model.components
    }
    stages = _stages(spec.pp, model, f"{where}: pp")
    for name, entry in spec.components.items():
        path = f"{where}: components.{name}"
        if name not in layouting:
            has = ", ".join(layouting)
            raise ConfigurationError(f"{where}: components: the model has no component {shown(name)} (it has {has})")
        has_tokens = next(entry.kind.has_tokens for entry in model.components if entry.name == name)
        override = convert(entry, OverrideSpec, path)
        layouting[name] = _override(layouting[name], override, len(stages), path)._replace(
            factor=override.factor, scale=_scale(override, has_tokens, f"{path}.scale")
        )
    context = convert({"size": spec.cp} if type(spec.cp) is int else spec.cp, ContextSpec, f"{where}: cp")
    if context.inside_tp and spec.tp % context.size:
        raise ConfigurationError(f"{where}: cp.size is {context.size} inside tp, which must divide tp {spec.tp}")
    ranks = spec.tp * len(stages) * (1 if context.inside_tp else context.size)
    if ranks > MAX_RANKS:
        raise ConfigurationError(f"{where}: {ranks} ranks, at most {MAX_RANKS} can be explained")
    pages = [layouting[component.name].page_size for component in model.components if component.kind.has_tokens]
    return Topology(
        title=spec.title or printable(Path(where).stem),
        model=model,
        layouting=layouting,
        tp=spec.tp,
        stages=stages,
        cp=context.size,
        cp_unit=context.unit or max(pages, default=1),
        cp_inside_tp=context.inside_tp,
        dp=spec.dp,
        dtype=spec.dtype,
        striped=spec.striped,
        cast=spec.cast,
        transports=(spec.transport,) if isinstance(spec.transport, str) else tuple(spec.transport),
    )


def _page_size(page_size: int, component: Any) -> int:
    """Pages of compressed entries hold whole entries: where the deployment's are too short, the least that do."""
    return math.lcm(page_size, component.kind.ratio)


def _model(value: str | dict[str, Any], where: str, folder: Path) -> Model:
    if isinstance(value, dict):
        return read_model(value, where)
    if value in PRESETS:
        return read_config(PRESETS[value], value)
    path = folder / value
    try:
        path = path / "config.json" if path.is_dir() else path
        found = path.is_file()
    except OSError as error:
        raise ConfigurationError(f"{where}: {shown(value)}: {error.strerror or error}") from None
    if not found:
        raise ConfigurationError(
            f"{where}: {shown(value)} is neither a config.json (or its folder) nor a preset ({', '.join(PRESETS)})"
        )
    config = parse_json(path)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: is no JSON object")
    return read_config(config, printable(str(path)))


def _stages(value: int | list[Any], model: Model, where: str) -> tuple[tuple[int, ...], ...]:
    count = model.layers
    if isinstance(value, list):
        stages = tuple(parse_layers(entry, count, where) for entry in value)
        listed = sorted(layer for stage in stages for layer in stage)
        if listed != list(range(count)):
            wrong = next((layer for layer in range(count) if listed.count(layer) != 1), 0)
            raise ConfigurationError(
                f"{where}: layer {wrong} is in {listed.count(wrong)} stages; each of the {count} layers must be in one"
            )
        return stages
    if value > count:
        raise ConfigurationError(f"{where}: {value} stages for {count} layers")
    bounds = [stage * count // value for stage in range(value + 1)]
    return tuple(tuple(range(first, last)) for first, last in itertools.pairwise(bounds))


def _scale(spec: OverrideSpec, has_tokens: bool, where: str) -> dict[str, int] | None:
    """How many neighbours along each axis share a scale."""
    if spec.scale is None:
        return None
    scale = convert(spec.scale, ScaleSpec, where)
    twice = [axis for axis in scale.axes if scale.axes.count(axis) > 1 or axis in scale.blocks]
    if twice:
        raise ConfigurationError(f"{where}: {twice[0]} is named twice")
    blocks = {**dict.fromkeys(scale.axes, 1), **scale.blocks}
    if has_tokens and blocks.get(TOKEN) != 1:
        raise ConfigurationError(f"{where}.axes: {TOKEN} is missing; each token has scales of its own")
    return blocks


def _override(usual: Layouting, spec: OverrideSpec, stages: int, where: str) -> Layouting:
    if spec.dtype:
        check_dtype(spec.dtype, f"{where}.dtype")
    stage = {"first": 0, "last": stages - 1}.get(spec.stage, spec.stage) if isinstance(spec.stage, str) else spec.stage
    if isinstance(stage, int) and not 0 <= stage < stages:
        raise ConfigurationError(f"{where}.stage: {stage} is none of the {stages} stages, 0 to {stages - 1}")
    return Layouting(
        spec.page_size or usual.page_size,
        spec.order or usual.order,
        spec.placement or usual.placement,
        spec.dtype,
        spec.whole,
        stage if isinstance(stage, int) else None,
    )
