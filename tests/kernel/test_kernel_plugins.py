"""The plugin door: strict, once, all or nothing, by entry point or by path."""

import logging
import subprocess
import sys
import zipfile

import pytest

from tokenspeed_kernel.plugins import (
    GROUP,
    OPTIONAL_VARIABLE,
    PATH_VARIABLE,
    PluginError,
    find_plugins,
    load_into,
    plugins_at,
)
from tokenspeed_kernel.plugins.loading import LoadedPlugin

KERNELS = """
from tokenspeed_kernel.ops.norm import NORM_SIGNATURE
from tokenspeed_kernel.registry import Band, KernelSpec, register_kernel

def spec(name):
    return KernelSpec(name=name, family="norm", mode="rms", solution="{solution}",
                      signatures=frozenset({{NORM_SIGNATURE}}), band=Band.PLUGIN)

def register():
    register_kernel(spec("{solution}_one"))(lambda x, weight, eps, out: None)
    {then}
    register_kernel(spec("{solution}_two"))(lambda x, weight, eps, out: None)
"""


@pytest.fixture
def make_plugin(tmp_path, monkeypatch):
    """Writes a plugin as a source folder and returns its path; names are unique, so modules never meet."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(name, then="pass", layout="."):
        folder = tmp_path / name
        package = folder / layout / f"plugin_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(KERNELS.format(solution=name, then=then))
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "1"\n'
            f'[project.entry-points."{GROUP}"]\n{name} = "plugin_{name}:register"\n'
        )
        return folder

    return make


@pytest.mark.parametrize("layout", [".", "src"])
def test_a_source_folder_registers_its_kernels_under_its_path(make_plugin, reference_registry, layout):
    folder = make_plugin("acme" if layout == "." else "acme_src", layout=layout)
    loaded = load_into(reference_registry, plugins_at(str(folder)))
    assert loaded == [LoadedPlugin(folder.name, str(folder))]
    names = {k.spec.name for k in reference_registry.kernels("norm", "rms")}
    assert names == {"reference_norm_rms", f"{folder.name}_one", f"{folder.name}_two"}
    assert reference_registry.kernel(f"{folder.name}_one").origin == str(folder)


def test_a_wheel_registers_its_kernels(make_plugin, reference_registry, tmp_path):
    folder = make_plugin("wheeled")
    wheel = tmp_path / "wheeled-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "plugin_wheeled" / "__init__.py", "plugin_wheeled/__init__.py")
        archive.writestr("wheeled-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: wheeled\nVersion: 1\n")
        archive.writestr("wheeled-1.dist-info/entry_points.txt", f"[{GROUP}]\nwheeled = plugin_wheeled:register\n")
    load_into(reference_registry, plugins_at(str(wheel)))
    assert reference_registry.kernel("wheeled_two").origin == str(wheel)


def test_a_wheel_with_native_code_has_to_be_installed(tmp_path):
    wheel = tmp_path / "native-1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("native/_core.so", b"")
    with pytest.raises(PluginError, match=r"holds native code \(native/_core.so\).*pip install"):
        plugins_at(str(wheel))


def test_a_failing_plugin_stops_the_start_by_name_and_leaves_nothing_behind(make_plugin, reference_registry):
    before = [k.spec.name for k in reference_registry.kernels()]
    folder = make_plugin("failing", then="raise OSError('no device')")
    with pytest.raises(PluginError) as caught:
        load_into(reference_registry, plugins_at(str(folder)))
    assert "kernel plugin 'failing'" in str(caught.value)
    assert "OSError: no device" in str(caught.value)
    assert f"{OPTIONAL_VARIABLE}=failing" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert [k.spec.name for k in reference_registry.kernels()] == before


def test_an_optional_plugin_may_fail_and_the_others_still_load(make_plugin, reference_registry, monkeypatch, caplog):
    found = plugins_at(str(make_plugin("limping", then="1 / 0"))) + plugins_at(str(make_plugin("sound")))
    monkeypatch.setenv(OPTIONAL_VARIABLE, "other, limping")
    with caplog.at_level(logging.WARNING, "tokenspeed_kernel"):
        limping, sound = load_into(reference_registry, found)
    assert "ZeroDivisionError" in limping.error
    assert sound.error is None
    assert "optional kernel plugin 'limping'" in caplog.text
    names = {k.spec.solution for k in reference_registry.kernels()}
    assert "sound" in names
    assert "limping" not in names


def test_a_kernel_that_fits_no_operation_names_its_plugin(make_plugin, reference_registry):
    folder = make_plugin(
        "stray", then="import dataclasses; register_kernel(dataclasses.replace(spec('x'), mode='rsm'))(print)"
    )
    with pytest.raises(PluginError, match=r"kernel plugin 'stray'.*no operation norm.rsm; declared are"):
        load_into(reference_registry, plugins_at(str(folder)))


def test_the_plugin_path_adds_to_what_is_installed(make_plugin, monkeypatch):
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    installed = [plugin.name for plugin in find_plugins()]
    folders = [str(make_plugin("zulu")), str(make_plugin("alpha"))]
    monkeypatch.setenv(PATH_VARIABLE, ":".join(folders))
    assert [plugin.name for plugin in find_plugins()] == sorted([*installed, "alpha", "zulu"])
    monkeypatch.setenv(PATH_VARIABLE, ":".join([*folders, folders[0]]))
    with pytest.raises(PluginError, match="two kernel plugins are called 'zulu'"):
        find_plugins()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no kernel plugin at .*: give a folder or a .whl file"),
        ("[project]\nname = 'x'\n", "declares no kernel plugin; its pyproject.toml needs"),
        ("[project\n", "is not valid TOML"),
    ],
)
def test_a_path_that_holds_no_plugin_says_what_is_missing(tmp_path, content, message):
    folder = tmp_path / "empty"
    if content is not None:
        folder.mkdir()
        (folder / "pyproject.toml").write_text(content)
    with pytest.raises(PluginError, match=message):
        plugins_at(str(folder))


PROCESS = """
import sys
import tokenspeed_kernel
heavy = [name for name in ("transformers", "triton", "gguf", "tokenspeed_kernel.numerics") if name in sys.modules]
assert not heavy, heavy
assert "plugin_once" not in sys.modules
from tokenspeed_kernel.ops import bind_rms_norm
assert bind_rms_norm().spec.name == "once_one"
assert [p.name for p in tokenspeed_kernel.load_plugins()].count("once") == 1
print("ready")
"""

FAILING_PROCESS = """
import tokenspeed_kernel
for attempt in range(2):
    try:
        tokenspeed_kernel.ops.bind_rms_norm()
    except Exception as error:
        print(type(error).__name__, "'broken'" in str(error))
"""


def run_process(code, path):
    environment = {"OMP_NUM_THREADS": "1", PATH_VARIABLE: str(path), "TOKENSPEED_KERNEL_OVERRIDE_NORM_RMS": "once"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_process_imports_lightly_and_loads_plugins_once_when_it_first_binds(make_plugin):
    done = run_process(PROCESS, make_plugin("once"))
    assert (done.stdout, done.stderr) == ("ready\n", "")


def test_a_process_with_a_broken_plugin_never_binds(make_plugin):
    done = run_process(FAILING_PROCESS, make_plugin("broken", then="raise ValueError"))
    assert done.stdout == "PluginError True\nPluginError True\n"
