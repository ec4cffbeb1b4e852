"""Text of models and datasets goes through every place that shows, stores or reads it, and none of it ever runs.

First the code is read for calls that could run or unpack outside text; then nasty strings go through every sink.
"""

import ast
import json
import logging
import pickle
import re
import sys
import threading
import time
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import prompt_rows, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer, cli
from grpo_moe.data import PromptSource
from grpo_moe.rewards import MathReward, ModelReward, RewardCaller, answer_reward, countdown_reward, format_reward
from grpo_moe.rl.capsule import load_capsule, save_capsule
from grpo_moe.rl.checkpoint import load_checkpoint, save_checkpoint
from grpo_moe.rl.display import LiveDisplay, PlainDisplay
from grpo_moe.rl.doctor import Check, doctor_table
from grpo_moe.rl.html_report import write_html_report
from grpo_moe.rl.loading import load_policy, load_tokenizer
from grpo_moe.rl.metrics import MetricsWriter, read_metrics
from grpo_moe.rl.report import write_completions, write_summary
from grpo_moe.rl.run_folder import checksum, file_facts, start_run
from grpo_moe.rollout.vllm_client import Client
from grpo_moe.text import clean, encodable, printable, steers_or_hides
from grpo_moe.types import RolloutBatch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
import running  # noqa: E402

SOURCES = sorted(path for part in ("grpo_moe", "recipes", "benchmark") for path in (ROOT / part).rglob("*.py"))

NASTY = [
    "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)", "<!--", "]]>",
    "</style></title></pre><iframe src=javascript:alert(1)>", "javascript:alert(1)", "[a](javascript:alert(1))",
    "&lt;script&gt;", "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link", "\x1bP+q\x1b\\",
    "\x9b2J\x9d0;t\x9c", "".join(map(chr, range(0x80, 0xA0))), "a\bb\x7f\x00\x07", "line\r\n2026 WARNING forged\n",
    "\u202egnp.exe\u202c\u2066\u2069\u200f", "\u2028\u2029\ufeff\u200b\u00ad", "[red]x[/red][link=http://x]y[/]", "[/]",
    "\udfff\ud800", "\U000e0041\U000e007f", "../../../tmp/x", "/etc/passwd", "a/b\\c:d*e?", "$(touch x)`touch x`;|&",
    "{0.__class__}{}%s%n%d", "$\\frac{$", "=cmd|'/c calc'!A1", "__import__('os').system('touch x')",
    "cos\nsystem\n(S'touch x'\ntR.", "!!python/object/apply:os.system ['touch x']", "NaN", "null", "\uff11\u0663\u00b2",
    "\u0301" * 300, "x" * 50_000,
]  # fmt: skip
"""Markup, terminal sequences, line breaks, bidi, paths, code of many kinds, formulas, odd digits, long text."""

EVERYTHING = " ".join(NASTY)


def is_harmless(text: str, *, lines: bool = False) -> bool:
    return not any(steers_or_hides(c) for c in text if not (lines and c in "\n\t"))


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Most of the time of short runs; only the tests of pictures draw them."""
    if "draws" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


@pytest.fixture
def draws():
    """Marks a test of pictures."""


# --- the code


FORBIDDEN = {
    "eval": None, "exec": None, "compile": None, "__import__": None, "breakpoint": None,
    "os.system": None, "os.popen": None, "pty.spawn": None, "tempfile.mktemp": None,
    "yaml.load": None, "yaml.unsafe_load": None, "yaml.full_load": None, "yaml.load_all": None,
    "runpy.run_path": None, "runpy.run_module": None, "importlib.import_module": None,
    "torch.load": ("weights_only", True), "np.load": ("allow_pickle", False),
    "ssl._create_unverified_context": None,
}  # fmt: skip
"""Calls, and the argument that makes one fit."""
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "telnetlib",
    "ftplib",
}
ARGUMENTS = {"shell": False, "verify": True, "allow_pickle": False, "weights_only": True}
"""Arguments that may only have this value, written out."""
ALLOWED = {
    ("grpo_moe/cli.py", "runpy.run_path"),  # the doctor runs the recipe that its user names
    ("grpo_moe/__init__.py", "importlib.import_module"),  # its own modules, when they are asked for
    ("grpo_moe/rl/launch.py", "os.execv"),  # Python itself, with the arguments of this process
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults_of(source: str, name: str):
    """(name, call) of what could run or unpack outside text, or open this machine to others."""
    tree = ast.parse(source)
    classes = {node.name: [dotted(base) for base in node.bases] for node in ast.walk(tree) if hasattr(node, "bases")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [module, *(alias.name for alias in node.names)]
            yield from ((name, part) for part in names if part.split(".")[0] in MODULES)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield name, "an address of every network"
        if not isinstance(node, ast.Call):
            continue
        call, given = dotted(node.func), {k.arg: getattr(k.value, "value", k.value) for k in node.keywords}
        safe_yaml = (
            call == "yaml.load" and len(node.args) == 2 and "yaml.SafeLoader" in classes.get(dotted(node.args[1]), ())
        )
        if call in FORBIDDEN and not safe_yaml:
            needed = FORBIDDEN[call]
            if needed is None or given.get(needed[0]) is not needed[1]:
                yield name, call
        if re.match(r"os\.(exec|spawn)", call) or call.endswith((".listen", "HTTPServer")):
            yield name, call
        yield from ((name, f"{call}({k}=)") for k, fit in ARGUMENTS.items() if k in given and given[k] is not fit)
        if given.get("trust_remote_code") is True:
            yield name, f"{call}(trust_remote_code=True)"
        if call.endswith(".from_pretrained") and call.startswith("Auto") and "trust_remote_code" not in given:
            yield name, f"{call} without trust_remote_code"  # transformers would ask at the terminal, or hang
        if call.startswith("subprocess.") and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            yield name, f"{call} of a text"


def test_no_call_could_run_or_unpack_what_comes_from_outside():
    found = [x for path in SOURCES for x in faults_of(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())]
    assert set(found) == ALLOWED, "not allowed, or allowed without need"


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)", "exec(x)", "import pickle", "from dill import loads", "os.system(x)", "torch.load(p)",
        "torch.load(p, weights_only=False)", "np.load(p)", "yaml.load(f)", "yaml.load(f, yaml.Loader)",
        "subprocess.run(x, shell=True)",
        "subprocess.run('ls')", "f(trust_remote_code=True)", "AutoModel.from_pretrained(p)", "s.bind(('0.0.0.0', 1))",
        "s.listen()", "requests.get(u, verify=False)", "os.execvp(x, y)",
    ],
)  # fmt: skip
def test_the_reader_of_the_code_sees(line):
    assert list(faults_of(line, "x"))
    fit = "torch.load(p, weights_only=True); np.load(p, allow_pickle=False); yaml.safe_load(f); subprocess.run(['ls'])"
    fit += "\nclass Own(yaml.SafeLoader): ...\nyaml.load(f, Own)"
    assert not list(faults_of(fit, "x"))


# --- what is loaded


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_with_code_in_its_pickles_runs_none(tmp_path):
    """Even where every checksum fits: they are no signature."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.LinearLR(optimizer.optimizer))  # as Policy does
    config = {
        "lr_scheduler_type": "constant", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "steps_per_generation": 1, "dynamic_sampling": False,
    }  # fmt: skip
    state = {"step": 1, "num_processes": 1, "config": config, "run_id": start_run(tmp_path)}
    path, ran = save_checkpoint(accelerator, state, str(tmp_path), keep=1), tmp_path / "ran"
    pickles = [p for p in path.iterdir() if p.suffix in (".bin", ".pkl", ".pt")]
    assert sorted(p.name for p in pickles) == ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"]
    bomb, whole = Bomb(ran), (path / "grpo_state.json").read_text()
    for file in pickles:
        for dump in (lambda file: torch.save({"state": bomb}, file), lambda file: file.write_bytes(pickle.dumps(bomb))):
            content, manifest = file.read_bytes(), json.loads(whole)
            dump(file)
            manifest["files"][file.name] = file_facts(file)
            del manifest["checksum"]
            (path / "grpo_state.json").write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
            torch.rand(1)  # the saved state of the stream is another
            with pytest.raises(ValueError, match="must (be a checkpoint of this model|bring back the random streams)"):
                load_checkpoint(accelerator, path, config)
            assert not ran.exists()
            file.write_bytes(content)
    pickle.loads(pickle.dumps(bomb))
    assert ran.exists(), "it would have"


CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({ran!r}).touch()
class Config(PretrainedConfig): model_type = "own"
"""


def test_code_beside_a_model_does_not_run_and_nothing_asks(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(CODE.format(ran=str(ran)))
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Config", "AutoTokenizer": ["code.Config", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto, "tokenizer_class": "Own"}))
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("asked at the terminal"))
    path = str(tmp_path)
    for load in (load_policy, ModelReward, lambda path: load_tokenizer(path, None)):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(path)
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "H200"]) == 2
    assert not ran.exists()


def test_weights_are_read_from_safetensors_alone(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="model_name_or_path must be in a folder .*safetensors"):
        load_policy(str(tmp_path))
    assert load_policy(str(tmp_path), use_safetensors=False)[0].num_parameters()


# --- terminals and logs


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_clean_is_one_line_and_printable_keeps_lines(text):
    assert is_harmless(clean(text)) and len(clean(text)) <= 160 and is_harmless(printable(text), lines=True)
    clean(text).encode(), printable(text).encode()
    assert printable("a\n\tb") == "a\n\tb" and clean("[red]a") == "[red]a"


@pytest.mark.parametrize("piece", ["\x9d", "\x1b]", "\x1b[", "\x1b[0", "\x9b1;", "\x1b]a\x9d", "\u0301", "\ud800"])
def test_showing_any_text_is_linear_in_it(piece):
    start = time.perf_counter()
    shown = printable(piece * 100_000)
    assert is_harmless(shown) and time.perf_counter() - start < 5


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_displays_show_nothing_that_steers(kind, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for text in NASTY:
        with kind(3, text) as display:
            display.update(1, {"reward": 0.5, f"seconds/{text}": 1.0, f"rewards/{text}": 1.0})
            display.show_completions([(text, text, 1.0), ([{"role": text, "content": text}], [text], None)])
            display.message(text)
    shown = capsys.readouterr().out
    assert is_harmless(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown), lines=True) or kind is LiveDisplay
    for piece in ("\x1b]", "\x1bP", "\x9b", "\x9d", "\x07", "\b", "\u202e", "\u2028", "forged\n", "\x1b[2J"):
        assert piece not in shown, repr(piece)


def test_the_doctor_shows_nothing_that_steers():
    for text in NASTY:
        table = doctor_table([Check("name", False, text, "rule", "fix")])
        assert is_harmless(table, lines=True) and len(table.splitlines()) == 4


def test_errors_of_the_commands_show_nothing_that_steers(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for text in NASTY:
        (tmp_path / "summary.json").write_text(json.dumps({"eval_before": text}), "utf-8", "surrogatepass")
        capsule = tmp_path / "c.safetensors"
        make_capsule(capsule, reason=text, config={text: text})
        assert cli.main(["report", str(tmp_path)]) == cli.main(["replay", str(capsule)]) == 2
        make_capsule(capsule, reason=text)
        assert cli.main(["replay", str(capsule)]) == 0
    out = capsys.readouterr()
    assert is_harmless(out.err, lines=True) and is_harmless(out.out, lines=True)
    assert "forged\n" not in out.out + out.err and out.out.count("update 1: ") == len(NASTY)


def test_a_command_shows_no_error_as_it_is(capsys, monkeypatch):
    def fails(arguments):
        raise ValueError(EVERYTHING)

    monkeypatch.setitem(cli._COMMANDS, "report", fails)
    assert cli.main(["report"]) == 2 and is_harmless(capsys.readouterr().err, lines=True)


def make_capsule(path, **known):
    ids = torch.ones(1, 2, dtype=torch.long)
    batch = RolloutBatch(
        input_ids=ids, attention_mask=ids.bool(), prompt_lengths=ids[:, 0], completion_ids=ids,
        completion_mask=ids.bool(), advantages=torch.ones(1), sampling_logps=torch.zeros(1, 2),
    )  # fmt: skip
    save_capsule(path, batch, GRPOConfig(), step=1, reason="")
    with safe_open(path, framework="pt") as file:
        header = {**json.loads(file.metadata()["capsule"]), **known}
    save_file(load_file(path), path, metadata={"capsule": json.dumps(header)})


def test_errors_of_a_recipe_show_nothing_that_steers(capsys):
    def refuse():
        raise ValueError(f"first line\n{EVERYTHING}")

    with pytest.raises(SystemExit):
        running.run(refuse)
    shown = capsys.readouterr().err
    assert shown.startswith("error: first line\n") and is_harmless(shown, lines=True)


def test_a_reward_function_that_quotes_a_completion_steers_no_log(caplog):
    def quotes(prompts, completions, **columns):
        raise ValueError(f"cannot read {completions[0]}")

    caplog.handler.setFormatter(logging.Formatter("%(message)s"))
    for text in NASTY:
        with pytest.raises(RuntimeError) as caught:
            RewardCaller(quotes)(["q"], [text], {})
        assert is_harmless(str(caught.value)) and len(str(caught.value)) < 2000
        RewardCaller(quotes, on_error="skip")(["q"], [text], {})
    assert is_harmless(caplog.text, lines=True) and caplog.text.count("in quotes") == len(NASTY)


def test_errors_about_a_dataset_show_nothing_that_steers():
    quoting = tokenizer()
    quoting.chat_template = "{{ raise_exception('cannot render ' + messages[0]['content']) }}"
    for text in NASTY:
        chat, other = [{"role": "user", "content": text}], [{"prompt": "a", text: 1}, {"prompt": "b"}]
        for rows in ([{text: 1}], other, [{"prompt": "a"}, {"prompt": {text}}], [{"prompt": chat}]):
            with pytest.raises(ValueError, match="^(dataset|prompt) must") as caught:
                PromptSource(rows, quoting, seed=0)
            assert is_harmless(str(caught.value)) and len(str(caught.value)) < 2000


# --- network


def test_the_key_of_a_server_follows_no_redirect_and_its_reply_steers_nothing():
    seen = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Authorization"]))
            body = EVERYTHING.encode("utf-8", "surrogatepass")
            self.send_response(302 if self.path == "/away" else 500)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", 10.0, "secret")
        for path in ("/away", "/fault"):
            with pytest.raises(RuntimeError, match=f"{path} must succeed") as caught:
                client.get(path)
            assert is_harmless(str(caught.value)) and len(str(caught.value)) < 1000
        server.shutdown()
    assert seen == [("/away", "Bearer secret"), ("/fault", "Bearer secret")]


# --- files


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


def test_no_text_of_a_run_becomes_markup_or_breaks_a_picture(tmp_path, draws):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    writer = MetricsWriter(folder / "metrics.jsonl")
    numbers = {f"{kind}/{text}": 1.0 for text in NASTY for kind in ("seconds", "waterfall", "rewards", "eval_x")}
    layers = {f"routing/{text}_layer_1": 1.0 for text in NASTY} | {f"routing/x_layer_{'9' * 5000}": 1.0}
    for step in (1, 2):
        writer.write({"step": step, **numbers, **layers})
    MetricsWriter(folder / "expert_load.jsonl").write({"step": 1, "load": {text: [1, 2] for text in NASTY}})
    evaluated = {text: 0.5 for text in NASTY}
    options = {text: text for text in NASTY}
    summary = {"steps": 2, "eval_before": evaluated, "eval_after": evaluated, "config": options, "versions": options}
    write_summary(folder / "summary.json", summary)
    rows = [{"step": text, "prompt": text, "completion": text, f"rewards/{text}": text} for text in NASTY]
    (folder / "completions").mkdir()
    for number, row in enumerate(rows[:3]):
        write_completions(folder / "completions" / f"completions_{number:06d}.parquet", [{**row, "step": 1}])
    page = write_html_report(folder).read_text(encoding="utf-8")
    seen = Tags(page)
    allowed = set("html head meta title style body h1 h2 p table tr th td div img pre b details summary".split())
    assert seen.tags <= allowed
    assert all(value.startswith("data:image/png;base64,") for name, value in seen.attributes if name == "src")
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("href", "action", "srcdoc")]
    assert is_harmless(page, lines=True) and "default-src 'none'" in page


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_metrics_keep_one_line_each_and_come_back(tmp_path, text):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write({"step": step, f"rewards/{text}": 0.5})
    raw = (tmp_path / "metrics.jsonl").read_bytes()
    assert raw.isascii() and raw.count(b"\n") == 2 and b"\r" not in raw
    assert read_metrics(writer.path) == [{"step": step, f"rewards/{text}": 0.5} for step in (1, 2)]


def test_json_of_any_depth_is_damage_with_a_name(tmp_path):
    deep = "[" * 100_000
    for name, read in (("metrics.jsonl", read_metrics), ("summary.json", lambda path: write_html_report(path.parent))):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        (tmp_path / name).write_text(f"{deep}\n" * 2)
        with pytest.raises(ValueError, match=f"{name} must"):
            read(tmp_path / name)
    save_file({"x": torch.ones(1)}, tmp_path / "c.safetensors", metadata={"capsule": deep})
    with pytest.raises(ValueError, match="capsule must be a whole file .*nested too deep"):
        load_capsule(tmp_path / "c.safetensors")


KNOWN = (
    r"checkpoint-\d+|(metrics|expert_load)\.jsonl|summary\.json|curves\.png|run_id|run\.lock|completions|capsules|model"
)


def read_table(path):
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def test_a_run_on_nasty_text_writes_only_its_own_files(tmp_path, capsys, monkeypatch):
    """Names of columns, of reward functions, prompts and completions; nothing of them names a file."""
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=len(NASTY) // 4 + 2, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=3, use_cpu=True, eval_on_start=False, save_steps=8, capsule_steps=4,
    )  # fmt: skip
    texts = iter(NASTY * 10)
    rewards = []
    for name in ("../../outside", "/tmp/outside", "\x1b[2Jx\n", "<b>"):

        def reward(prompts, completions, **columns):
            return [float(len(text) % 5) for text in completions]

        reward.__name__ = name
        rewards.append(reward)
    rows = [{**row, "../x": text, "/etc/x\n": text} for row, text in zip(prompt_rows(8), NASTY[:8], strict=True)]
    trainer = GRPOTrainer(tiny_model(num_hidden_layers=1), rewards, args, rows, processing_class=tokenizer())
    monkeypatch.setattr(type(trainer.tokenizer), "batch_decode", lambda self, ids, **_: [next(texts) for _ in ids])
    monkeypatch.chdir(tmp_path)
    trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    left = sorted(str(path.relative_to("run")) for path in Path("run").glob("*"))
    assert [name for name in left if not re.fullmatch(KNOWN, name)] == []
    files = [path.name for name in ("completions", "capsules") for path in Path("run", name).iterdir()]
    assert all(re.fullmatch(r"completions_\d{6}\.parquet|update_\d{6}_0\.safetensors", name) for name in files)
    kept = [row["completion"] for path in Path("run", "completions").iterdir() for row in read_table(path)]
    assert len(files) > 10 and {encodable(text) for text in NASTY} <= set(kept)
    assert is_harmless(capsys.readouterr().out, lines=True)


# --- rewards


PARSED = [
    "9**9**9", "9^9^9^9", "(" * 10**6, "\\boxed{" * 10**5, "\\boxed{" + "{" * 10**5 + "}" * 10**5 + "}",
    "<answer>" * 10**5, "1" * 10**6, "1," * 10**6, "1/" * 10**5, "0." + "0" * 10**6 + "1", "1e999999999", "-" * 10**6,
    "<think>" * 10**5 + "</think>" * 10**5, "8-2=6+8=14;" * 10**5, "=" * 10**6, "\n" * 10**6, "\\" * 10**6,
    "1/3" * 10**5, "\uff11\u0663\u00b2\u0be7" * 10**5, "1+1=2" + "+1=3" * 10**5, "$" * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("text", [*NASTY, *PARSED], ids=lambda text: re.sub(r"\W", "", text)[:8] or "x")
def test_parsers_are_bounded_on_any_text(text):
    start = time.perf_counter()
    for wrapped in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"<think></think><answer>{text}</answer>"):
        given = {"prompts": ["q"], "completions": [wrapped]}
        assert answer_reward(**given, answer=["17.25"]) == [0.0]
        assert countdown_reward(**given, numbers=[[8, 8, 2]], target=[18]) == [0.0]
        assert format_reward()(**given)[0] in (0.0, 1.0)
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("given", "right", "reward"),
    [
        ("12345678901234567891", "12345678901234567890", 0.0),  # equal as floats
        ("0.1000000000000000000001", "0.1", 0.0),
        ("1e400", "1e999", 0.0),
        ("inf", "infinity", 0.0),
        ("1_0", "10", 0.0),
        ("\uff11\uff10", "10", 0.0),
        ("1e3", "1000", 1.0),
        ("+7.00", "7", 1.0),
        (".5", "0.50", 1.0),
        ("1" * 99, "1" * 98 + "2", 0.0),
    ],
)
def test_numbers_are_compared_exactly_and_only_as_plain_ones(given, right, reward):
    assert answer_reward(["q"], [given], answer=[right]) == [reward]


def test_the_mathematics_is_bounded_on_any_text():
    """One comparison ends at its limit, whatever it is; test_equivalence.py has the worker's own tests."""
    pytest.importorskip("math_verify")
    reward = MathReward(time_limit=1)
    hostile = [*NASTY, *PARSED, "\\frac{1}{" * 90, "{" * 499 + "}" * 499, "2^{2^{50}}"]
    start = time.perf_counter()
    for text in hostile:
        wrapped = f"\\boxed{{{text}}}" if text.count("{") == text.count("}") else text
        assert reward(["q"], [wrapped], answer=["\\frac{355}{113}"]) == [0.0], repr(text[:50])
    assert time.perf_counter() - start < 8 * len(hostile)
    assert reward(["q"], ["\\boxed{0.5}"], answer=["\\frac{1}{2}"]) == [1.0]
