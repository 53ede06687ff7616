"""The converters into GPT-NeoX: tools/ckpts/convert_hf_llama_to_neox.py and convert_raw_llama_weights_to_neox.py."""

from typing import List

import libcst as cst

from tools.neox_patch import find
from tools.neox_patch.change import Change
from tools.neox_patch.source import AnchorNotFound, Source, same_code

PATH = "tools/ckpts/convert_hf_llama_to_neox.py"
RAW_PATH = "tools/ckpts/convert_raw_llama_weights_to_neox.py"
FUSED = "attention.query_key_value.weight"
HEAD = "lm_head.weight"
PARAMETERS = "hf_import.attention_parameters"
WEIGHTS = "hf_import.weights_to_import"
SEARCH_PATH = "sys.path.append(str(Path(__file__).resolve().parents[2]))"


def _uses(source: Source, statement: str) -> None:
    """The package is not where these scripts are run from, so they have to say where it is."""
    imports = [line for line in source.module.body if _imports(line)]
    if any(same_code(source.code(line).strip(), statement) for line in imports):
        return
    definitions = [line for line in source.module.body if isinstance(line, (cst.ClassDef, cst.FunctionDef))]
    top = source.span(definitions[0])[0] if definitions else None
    imports = [line for line in imports if top is None or source.span(line)[0] < top]
    if not imports:
        raise AnchorNotFound(f"{source.path}: an import at the top of the file")
    known = [source.code(line).strip() for line in imports]
    modules = [line for line in ("import sys", "from pathlib import Path") if line not in known]
    source.insert_after(imports[-1], "\n".join([*modules, "", SEARCH_PATH, statement]))


def _imports(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))


def _attention(source: Source) -> None:
    _uses(source, "from megatron.head_dim import hf_heads, hf_import")
    convert = find.function_named(source, "convert_model")
    weights, config, ranks = _three(source, convert)
    for node in find.where_is(convert, source, "model.model.config"):
        source.replace(node, config)  # it had to be a global name
    width = find.assignment_to(convert, source, "head_dim", "def convert_model")
    source.replace(width.value, f"hf_heads.hf_geometry({config}).head_dim")
    if find.calls_of(convert, source, PARAMETERS):
        return
    loop = _fused_loop(source, convert)
    layers = _loop_around(source, loop)
    parts = _parts(source, loop)
    old = [line for name in parts for line in _assignments(source, layers, name)]
    _check_unused_elsewhere(source, layers, [*old, loop], parts)
    first = min(old, key=lambda line: source.span(line)[0])
    for line in old:
        source.remove_statement(line, with_comments=line is not first)
    states, key = _target(source, loop)
    source.replace_statement(
        loop,
        f"""
        for i, parameters in enumerate(
            {PARAMETERS}(
                {weights}, {config}, {source.code(layers.target)}, {ranks}
            )
        ):
            for name, tensor in parameters.items():
                {states}[i][
                    {key.replace("query_key_value.weight", "{name}")}
                ] = tensor
        """,
    )


def _three(source: Source, convert: cst.FunctionDef) -> List[str]:
    names = find.parameter_names(convert)
    if len(names) < 3:
        raise AnchorNotFound(f"{source.path}: parameters for weights, config and ranks of def convert_model")
    return names[:3]


def _fused_loop(source: Source, convert: cst.FunctionDef) -> cst.For:
    """The innermost loop that sets the fused parameter."""
    loops = [node for node in find.every(convert, cst.For) if _fused_targets(source, node)]
    inner = [node for node in loops if not any(other in loops for other in find.every(node.body, cst.For))]
    return find.only(source, f"for that sets ...{FUSED} in def convert_model", inner)


def _fused_targets(source: Source, scope: cst.CSTNode) -> List[cst.Subscript]:
    """Places like states[i][f"...attention.query_key_value.weight"] that are assigned to."""
    targets = [node.targets[0].target for node in find.every(scope, cst.Assign)]
    return [
        target
        for target in targets
        if isinstance(target, cst.Subscript)
        and isinstance(target.value, cst.Subscript)
        and source.code(target.slice[0]).endswith((f'{FUSED}"', f"{FUSED}'"))
    ]


def _target(source: Source, loop: cst.For) -> List[str]:
    """The name of the ranks' dictionaries, and the key as it is written."""
    target = _fused_targets(source, loop)[0]
    return [source.code(target.value.value), source.code(target.slice[0])]


def _loop_around(source: Source, loop: cst.For) -> cst.For:
    node = source.parent(loop)
    while not isinstance(node, (cst.For, cst.FunctionDef)):
        node = source.parent(node)
    if not isinstance(node, cst.For) or source.parent(loop) is not node.body:
        raise AnchorNotFound(f"{source.path}: a loop over layers around the one that sets {FUSED} in def convert_model")
    return node


def _parts(source: Source, loop: cst.For) -> List[str]:
    """The names of q, k and v, which the loop cuts into chunks."""
    chunks = find.calls_of(loop.iter, source, "torch.chunk")
    names = [call.args[0].value.value for call in chunks if call.args and isinstance(call.args[0].value, cst.Name)]
    if len(names) != 3:
        raise AnchorNotFound(f"{source.path}: torch.chunk of q, k and v in the loop that sets {FUSED}")
    return names


def _assignments(source: Source, layers: cst.For, name: str) -> List[cst.CSTNode]:
    found = [source.statement(node) for node in find.assignments_to(layers.body, source, name)]
    if not found or any(line not in layers.body.body for line in found):
        raise AnchorNotFound(f"{source.path}: {name} = ... in the loop over layers of def convert_model")
    return found


def _check_unused_elsewhere(source: Source, layers: cst.For, old: List[cst.CSTNode], parts: List[str]) -> None:
    for line in layers.body.body:
        used = {name.value for name in find.every(line, cst.Name)} & set(parts)
        if used and not any(line is other for other in old):
            raise AnchorNotFound(
                f"{source.path}: def convert_model without a statement of its own that uses "
                f"{', '.join(sorted(used))}: {source.code(line).strip().splitlines()[0]!r}"
            )


def _tied(source: Source) -> None:
    convert = find.function_named(source, "convert_model")
    weights = _three(source, convert)[0]
    head = f'{weights}["{HEAD}"]'
    loops = [node for node in convert.body.body if isinstance(node, cst.For) and find.where_is(node.iter, source, head)]
    loop = find.only(source, f"for over chunks of {head} in def convert_model", loops)
    returned = [node.value for node in find.every(convert, cst.Return) if node.value is not None]
    if not returned:
        raise AnchorNotFound(f"{source.path}: return of the converted weights in def convert_model")
    source.insert_before(
        loop,
        f"""
        if "{HEAD}" not in {weights}:  # the embedding is the output layer
            return {source.code(returned[-1])}
        """,
    )
    parsed = _parsed(source)
    source.insert_before(
        source.statement(parsed),
        f"""
        {source.code(parsed.func).rsplit(".", 1)[0]}.add_argument(
            "--tied",
            action="store_true",
            help="Keep tied embeddings tied; else the output layer is a copy",
        )
        """,
    )


def _parsed(source: Source) -> cst.Call:
    calls = [node for node in find.every(source.module, cst.Call) if source.code(node.func).endswith(".parse_args")]
    call = find.only(source, "parse_args(...)", calls)
    if not isinstance(source.parent(call), cst.Assign):
        raise AnchorNotFound(f"{source.path}: args = {source.code(call)}")
    return call


def _settings(source: Source) -> None:
    _uses(source, "from megatron.head_dim import hf_heads, hf_import")
    args = source.code(source.parent(_parsed(source)).targets[0].target)
    call = find.call_of(source.module, source, "convert_model", "the script")
    if len(call.args) != 3:
        raise AnchorNotFound(f"{source.path}: convert_model(weights, config, ranks) in the script")
    weights, config, ranks = (source.code(arg.value) for arg in call.args)
    if '"--model_path"' not in source.text and "'--model_path'" not in source.text:
        raise AnchorNotFound(f"{source.path}: the argument --model_path")
    if not find.calls_of(source.module, source, WEIGHTS):
        read = find.assignment_to(source.module, source, weights, "the script")
        if not source.code(read.value).endswith(".state_dict()"):
            raise AnchorNotFound(f"{source.path}: {weights} = model.state_dict() in the script")
        model = source.code(read.value)[: -len(".state_dict()")]
        source.replace(read.value, f"{WEIGHTS}({model}, {ranks}, {args}.tied)")
    source.insert_after(
        source.statement(call),
        f"""
        hf_import.write_neox_settings(
            {args}.model_path, {config}, {weights}, {ranks}
        )
        """,
    )


def _raw(source: Source) -> None:
    _uses(source, "from megatron.head_dim import hf_heads")
    for name in ("convert_model_pipeline", "convert_model_sequential"):
        function = find.function_named(source, name)
        width = find.assignment_to(function, source, "dims_per_head", f"def {name}")
        if find.calls_of(width, source, "hf_heads.raw_head_dim"):
            continue
        heads = [
            node.value
            for node in find.every(function, cst.Subscript)
            if find.is_code(source, node, f'{source.code(node.value)}["n_heads"]')
        ]
        if not heads:
            raise AnchorNotFound(f'{source.path}: params["n_heads"] in def {name}')
        source.replace(width.value, f"hf_heads.raw_head_dim({source.code(heads[0])})")


CHANGES = [
    Change(PATH, "import reads head_dim, biases and norms of q and k; without GQA head by head", _attention),
    Change(PATH, "import can keep tied embeddings tied (--tied)", _tied),
    Change(PATH, "import refuses what GPT-NeoX cannot hold, and writes the YAML keys of the model", _settings),
    Change(RAW_PATH, "import of Meta's files reads head_dim of params.json", _raw),
]
