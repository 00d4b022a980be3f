"""Asks the installed transformers whether the names that ``hf_names`` knows are still there."""

import ast
import importlib
import inspect
import subprocess
import sys
from itertools import chain

import pytest
import transformers
from support.families import OLDER
from support.paths import ROOT
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gradmem_lib import hf_names
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.known import model_table

LIBRARY = ROOT / "gradmem_lib"
EXPORTED = dir(transformers)  # names only: importing all of them takes minutes


@pytest.fixture(scope="module")
def config_fields() -> set[str]:
    """The fields that any config of transformers has."""
    found = set()
    for kind in CONFIG_MAPPING.values():
        found |= {*inspect.signature(kind.__init__).parameters, *dir(kind), *kind.attribute_map}
        found |= set(kind.attribute_map.values())
        for inner in kind.sub_configs.values():
            found |= {*inspect.signature(inner.__init__).parameters}
    return found


def test_each_class_stands_in_its_module():
    for name, where in hf_names.CLASSES.items():
        in_its_module = getattr(importlib.import_module(where), name)
        assert hf_names.hf_class(name) is in_its_module


def test_a_class_that_is_gone_is_an_error_and_no_silent_no(monkeypatch):
    module = importlib.import_module(hf_names.CLASSES["Cache"])
    monkeypatch.delattr(module, "Cache")
    with pytest.raises(AttributeError, match="Cache"):
        hf_names.hf_class("Cache")


def test_without_transformers_no_object_is_of_a_class_of_its():
    asks = "from gradmem_lib.hf_names import CLASSES, hf_class; print([*map(hf_class, CLASSES)])"
    found = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[(), (), (), ()]"


def test_models_and_layers_have_the_names_of_checkpointing():
    if not OLDER:
        newest = hf_names.CHECKPOINTING_METHODS[0]
        assert hasattr(transformers.PreTrainedModel, f"{newest}_disable")
        assert newest in inspect.signature(transformers.TrainingArguments).parameters
    present = [
        name
        for name in hf_names.CHECKPOINTING_METHODS
        if hasattr(transformers.PreTrainedModel, f"{name}_enable")
    ]
    assert present
    layer = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    assert hasattr(layer, hf_names.LAYER_SWITCH)


def test_of_the_well_known_types_these_take_no_tokens():
    found = set()
    for row in model_table().values():
        row.pop("ids")
        model = model_class(AutoConfig.for_model(**row))
        takes = inspect.signature(model.forward).parameters
        if not {"input_ids", "decoder_input_ids"} & {*takes}:
            found.add(row["model_type"])
    assert found == set(hf_names.NO_TOKENS)


def test_a_layer_takes_its_input_and_has_its_parts_by_these_names():
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    t5 = importlib.import_module("transformers.models.t5.modeling_t5")
    first = [*inspect.signature(llama.LlamaDecoderLayer.forward).parameters][1]
    assert first == hf_names.LAYER_INPUT
    classes = [*vars(llama), *vars(t5)]
    for ends in hf_names.PARTS.values():
        for end in ends:
            assert any(name.endswith(end) for name in classes), end


def test_learned_positions_stand_in_a_table_of_this_name():
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    names = [name for name, _ in transformers.BertModel(config).named_modules()]
    assert any(name.endswith(hf_names.POSITION_TABLE) for name in names)


def test_tables_of_classes_are_there_and_have_rows():
    names = [*hf_names.PAIR_TABLES, *hf_names.TABLES]
    empty = [name for name in names if not getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING", ())]
    assert not empty


def test_classes_end_so():
    gone = {*hf_names.LABELS_OF_HEAD}
    for name in EXPORTED:
        gone -= {end for end in gone if name.endswith(end)}
    assert not gone


def test_a_config_has_each_field(config_fields):
    others = (
        *chain.from_iterable(hf_names.SIZES.values()),
        *hf_names.OUTPUTS_OF_EACH_LAYER,
        *hf_names.IGNORED_LABELS,
    )
    assert not {*others} - config_fields


def read_from_configs() -> dict[str, str]:
    """The fields that the library asks a config for by a string, and where."""
    found = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        if "lessons" in path.parts:
            continue  # answers of learners ask for names that are gone
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) not in ("getattr", "hasattr", "delattr"):
                continue
            of, name = node.args[:2]
            last_word = ast.unparse(of).rpartition(".")[2]
            if last_word in ("config", "text", "vision") and isinstance(name, ast.Constant):
                found[name.value] = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
    return found


def test_a_config_has_each_field_that_the_library_asks_for(config_fields):
    asked = read_from_configs()
    assert len(asked) > 15
    methods = {"to_dict", "to_json_string"}  # of some configs that are not transformers'
    instance_only = {"_attn_implementation", "__dict__", "quantization_config"}
    gone = {name: asked[name] for name in {*asked} - config_fields - methods - instance_only}
    assert not gone
    assert all(hasattr(transformers.PretrainedConfig, name) for name in methods)


def test_no_other_file_below_the_course_spells_these_names():
    names = {
        *hf_names.CHECKPOINTING_METHODS,
        *hf_names.LABELS_OF_HEAD,
    }
    for path in sorted(LIBRARY.rglob("*.py")):
        inside = path.relative_to(LIBRARY)
        if inside.parts[0] == "course" or inside.name == "hf_names.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{inside}:{node.lineno} spells {node.value!r}"
