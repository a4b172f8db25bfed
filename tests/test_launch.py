"""Launch lines, node lists, and peak figures: all plain values."""

import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train import cli
from train.errors import UserError
from train.hardware import BFLOAT16_PEAKS, device_peak_flops, format_mfu, mfu, peak_flops
from train.launch import expand_nodelist, launch_command, rendezvous_port

SLURM = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[08-10]"}


def option(line, name):
    words = shlex.split(line)
    return words[words.index(name) + 1]


def test_one_machine():
    line = launch_command(["llama3-8b", "--out", "my runs"], {}, nproc=8)
    assert line == "torchrun --standalone --nproc-per-node 8 --no-python functitan train llama3-8b --out 'my runs'"
    assert option(launch_command([], {}), "--nproc-per-node") == "gpu"


def test_n4_three_slurm_nodes():
    line = launch_command(["llama3-8b"], SLURM | {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "96"})
    assert shlex.split(line)[0] == "srun"
    assert option(line, "--nodes") == option(line, "--ntasks") == option(line, "--nnodes") == "3"
    assert option(line, "--ntasks-per-node") == "1" and option(line, "--cpus-per-task") == "96"
    assert option(line, "--nproc-per-node") == "8"
    assert option(line, "--rdzv-endpoint") == "node08:24242" and option(line, "--rdzv-id") == "4242"
    assert line.endswith("--no-python functitan train llama3-8b")


@pytest.mark.parametrize("count", ["SLURM_JOB_NUM_NODES", "SLURM_NNODES"])
def test_n4_on_the_command_line(count, monkeypatch, capsys):
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {count: "3", "SLURM_JOB_NODELIST": "node[01-03]", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["launch", "debug", "--nproc=2", "--mesh.fsdp", "-1", "--seed", "4"]) == 0
    line = capsys.readouterr().out.strip()
    assert "--nnodes 3 --nproc-per-node 2" in line and "node01:20007" in line
    job = "--no-python functitan train debug --mesh.fsdp -1 --seed 4"
    assert line.endswith(job), "launch's own options are not the job's"


def test_launch_warns_of_a_mesh_that_the_machines_do_not_fit(capsys):
    assert cli.main(["launch", "debug", "--nnodes", "1", "--nproc", "4"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("torchrun ") and "there are 4 devices" in said.err


def test_launch_refuses_what_cannot_run_anywhere(capsys):
    assert cli.main(["launch", "debug", "--train.accumulation", "3"]) == 2
    assert capsys.readouterr().out == ""


def test_part_of_an_allocation_and_no_more():
    assert option(launch_command([], SLURM, nnodes=2), "--nnodes") == "2"
    assert launch_command([], SLURM, nnodes=1).startswith("torchrun --standalone")
    with pytest.raises(UserError, match="--nnodes: is 4, but the Slurm allocation has 3; give 1 to 3"):
        launch_command([], SLURM, nnodes=4)


def test_several_machines_without_slurm_need_a_place_to_meet():
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        launch_command([], {}, nnodes=2)
    line = launch_command([], {"MASTER_ADDR": "head"}, nnodes=2)
    assert line.startswith("torchrun --nnodes 2") and option(line, "--rdzv-endpoint") == "head:29400"
    line = launch_command([], {"MASTER_ADDR": "head", "MASTER_PORT": "5000"}, nnodes=2)
    assert option(line, "--rdzv-endpoint") == "head:5000"


@pytest.mark.parametrize(
    "env, said",
    [
        (SLURM | {"SLURM_JOB_NUM_NODES": "three"}, "SLURM_JOB_NUM_NODES='three' is no number of nodes"),
        (SLURM | {"SLURM_JOB_NODELIST": "node[1-2]"}, "Slurm says 3 nodes but its node list .* names 2"),
        ({"SLURM_NNODES": "2"}, "set SLURM_JOB_NODELIST"),
    ],
)
def test_an_allocation_that_contradicts_itself(env, said):
    with pytest.raises(UserError, match=said):
        launch_command([], env)


@pytest.mark.parametrize(
    "text, count", [("8", "8"), ("h100:8", "8"), ("gpu:h100:4", "4"), ("a100:2,v100:1", "gpu"), ("", "gpu")]
)
def test_slurm_gpu_counts(text, count):
    assert option(launch_command([], {"SLURM_GPUS_PER_NODE": text}), "--nproc-per-node") == count


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node7", ["node7"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[9-11],b,c[2]-ib0", ["a9", "a10", "a11", "b", "c2-ib0"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("gpu-a100-[0098-0101].cluster", [f"gpu-a100-{n:04}.cluster" for n in range(98, 102)]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "n[1-", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]"])
def test_bad_node_lists(text):
    with pytest.raises(UserError, match="node list"):
        expand_nodelist(text)


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 5))
def test_a_range_keeps_its_width(first, more, width):
    last = first + more
    assert expand_nodelist(f"n[{first:0{width}}-{last:0{width}}]") == [f"n{i:0{width}}" for i in range(first, last + 1)]


@given(st.integers(0, 10**9))
def test_the_port_is_free_to_choose(job_id):
    """Below what Linux gives to outgoing connections, and the same for an element of an array job."""
    assert 20000 <= rendezvous_port(str(job_id)) < 30000
    assert rendezvous_port(f"{job_id}_3") == rendezvous_port(str(job_id))


# Peak figures (N3) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Instinct MI350X", 2306.9),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_n3_a_known_device(name, tera):
    assert peak_flops(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "unknown",
        "",
        "cpu",
        "AMD EPYC 9654 96-Core Processor",
        "NVIDIA A100-SXM-64GB",  # a custom part with more cores
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice
        "NVIDIA H100 80GB HBM3 MIG 2g.20gb",
        "NVIDIA A10G",  # not an A10
        "NVIDIA RTX A4000",
        "NVIDIA L40G",
        "NVIDIA H100",  # which one?
        "NVIDIA H100 80GB HBM2e",
        "AMD Instinct MI308X",
        "NVIDIA GeForce RTX 4090",
    ],
)
def test_n3_anything_else_has_no_figure(name):
    assert peak_flops(name) is None
    assert format_mfu(mfu(1e4, 1e9, peak_flops(name))) == "n/a"


def test_no_device_name_belongs_to_two_rows():
    names = ["A10", "A100", "A100-SXM4-40GB", "L4", "L40", "L40S", "H20", "H200", "H200 NVL", "GH200", "B200", "GB200"]
    for name in names:
        assert sum(bool(re.fullmatch(pattern, name)) for pattern, _ in BFLOAT16_PEAKS) == 1, name


def test_other_precisions_and_cpus_have_no_figure():
    assert peak_flops("NVIDIA H200", "float32") is None
    assert device_peak_flops("cpu") is None


def test_mfu_is_the_fraction_of_the_peak():
    assert mfu(tokens_per_s=1000.0, flops_per_token=6e9, peak=12e12) == pytest.approx(0.5)
    assert format_mfu(0.4128) == "41.3%"
    assert mfu(1000.0, 6e9, None) is None
