"""The record: JSON there and back, CSV, tables and figures."""

import csv
import json
import math
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

import wellposed
from wellposed.errors import ConfigError, DataError
from wellposed.measurement import Measurement, heat_map


def row(layer=0, role="query", **changes):
    values = {
        "stack": "encoder" if layer is not None else None,
        "layer": layer,
        "role": role,
        "kind": None,
        "path": f"layers.{layer}" if layer is not None else "embeddings.token",
        "parameter": f"{role}.weight",
        "rows": 3,
        "cols": 4,
        "scale_free_orthogonality_error": 0.125,
        "orthogonality_error": 0.25,
        "gram": "rows",  # in files of version 0.3
        "sigma_max": 2.0,
        "sigma_min": 0.5,
        "condition_number": 4.0,
        "stable_rank": 1.3125,
        "sigma_max_status": "exact",
        "singular_values": [2.0, 1.0, 0.5],
    }
    return {**values, **changes}


def activation():
    return {
        "stack": "encoder",
        "layer": 0,
        "kind": "attention",
        "path": "layers.0.attention",
        "mean_norm": 1.5,
        "max_norm": 3.0,
        "attention_entropy": [1.0, 2.0],
        "attention_sensitivity": [0.25, 0.125],
        "affinity_orthogonality_error": [0.5, 0.75],
    }


def full():
    singular = row(1, "key", sigma_min=0.0, condition_number=math.inf)
    return Measurement([row(), singular, row(None, "token_embedding")], [activation()], ["a note"])


def test_json_there_and_back(tmp_path):
    path = full().to_json(tmp_path / "deep" / "m.json")
    assert Measurement.from_json(path) == full()
    assert "Infinity" not in path.read_text()  # strict JSON: readable outside Python
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 1, "rows": [', "not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"schema_version": 9, "rows": []}', "schema_version is 9, this version reads 1; exp"),
        ('{"schema_version": 1}', "has no list of rows"),
        ('{"schema_version": 1, "rows": {}}', "has no list of rows"),
        ('{"schema_version": 1, "rows": [1]}', "has no list of rows"),
        ('{"schema_version": 1, "rows": [{"role": 1}]}', "no usable stack, layer, path, role"),
    ],
)
def test_damaged_files_are_named(tmp_path, text, message):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        Measurement.from_json(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match=r"none\.json: .*No such file"):
        Measurement.from_json(tmp_path / "none.json")


def test_csv(tmp_path):
    path = full().to_csv(tmp_path / "m.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [r["role"] for r in rows] == ["query", "key", "token_embedding"]
    assert float(rows[1]["condition_number"]) == math.inf
    assert rows[2]["layer"] == ""


def test_table_holds_every_weight_and_module_in_padded_columns():
    lines = full().table().splitlines()
    assert lines[0] == "Weights"
    assert set(lines[2]) == {"-", " "}
    assert lines[3].split() == [
        "encoder.0.query",
        "3",
        "x",
        "4",
        "0.125",
        "0.25",
        "2",
        "0.5",
        "4",
        "1.312",
    ]
    assert {line.index("x") for line in lines[3:6]} == {lines[3].index("x")}
    words = " ".join(lines).split()
    assert {"encoder.1.key", "token_embedding", "inf", "layers.0.attention", "0.625"} <= {*words}
    assert lines[-1] == "note: a note"
    assert "[red]x[/red]" in Measurement([row(role="[red]x[/red]")]).table()  # no markup is read


def test_figures(tmp_path):
    svg = full().plot(tmp_path / "m.svg")
    root = ET.fromstring(svg.read_text())
    words = "".join(root.itertext())
    for expected in ("encoder 0", "encoder 1", "query", "err_orth"):
        assert expected in words
    png = full().plot(tmp_path / "m.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    again = full().plot(tmp_path / "again.svg")
    assert again.read_text() == svg.read_text()


def test_figure_without_numbers_or_layers(tmp_path):
    for bare in (row(scale_free_orthogonality_error=None), row(None, "token_embedding")):
        assert Measurement([bare]).plot(tmp_path / "bare.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"received suffix '\.pdf'"):
        full().plot(tmp_path / "m.pdf")


def test_reading_a_measurement_does_not_import_torch():
    code = "import sys, wellposed.measurement as m; m.Measurement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_is_gone_says_what_to_use():
    with pytest.raises(AttributeError, match=r"DIAGNOSTICS.*find_roles\(model\)\.weights\(\)"):
        _ = wellposed.measurement.DIAGNOSTICS


def test_of_experts_the_map_shows_the_largest():
    errors = (0.25, None, 0.5, 0.125)
    experts = [row(scale_free_orthogonality_error=error) for error in errors]
    heat = heat_map([*experts, row(1, "key")], "scale_free_orthogonality_error")
    assert (heat.roles, heat.values) == (["query", "key"], [[0.5, None], [None, 0.125]])
