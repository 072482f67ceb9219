"""What a cell will read and write. Where it can be done, the cell is run and the forecast compared with its traces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.preflight import Forecast, forecast
from holdfast.preflight.languages import Effect, shell, sql
from holdfast.preflight.steps import Steps

Flows = dict[str, list[str]]


def flows(seen: Forecast) -> Flows:
    return {flow.output: flow.inputs for flow in seen.flows}


READ_AND_WRITTEN = [
    ("open('a.txt').read()", ["a.txt"], []),
    ("open('a.txt', 'w')", [], ["a.txt"]),
    ("open('a.txt', mode='ab')", [], ["a.txt"]),
    ("open('a.txt', 'r+')", ["a.txt"], ["a.txt"]),
    ("open('a.txt', mode)", [], []),
    ("open('/mnt/data/deep/a.txt')", ["deep/a.txt"], []),
    ("open('./x/../a.txt')", ["a.txt"], []),
    ("open('/tmp/a'), open('../up'), open('~/a'), open('/mnt/database/a')", [], []),
    ("pd.read_csv('https://example.org/a.csv')\ndf.to_csv('s3://bucket/a.csv')", [], []),
    ("Path('a.txt').read_text()\nPath('d', 'b.txt').write_bytes(b'')", ["a.txt"], ["d/b.txt"]),
    ("p = Path('d') / 'a.txt'\nwith p.open('w') as f: pass\np.unlink()", [], ["d/a.txt"]),
    ("Path('a').rename('b')", ["a"], ["b", "a"]),
    ("Path('in.csv').with_suffix('.json').write_text('')", [], ["in.json"]),
    ("import pandas\npandas.read_excel(io='a.xlsx').to_parquet(path='b.parquet')", ["a.xlsx"], ["b.parquet"]),
    ("pd.read_sql('select 1', con)\ndf.to_sql('table', con)", [], []),
    ("pl.scan_parquet('in/*.parquet').sink_csv('out.csv')", ["in/*.parquet"], ["out.csv"]),
    ("pq.read_table('a.parquet')\npq.write_table(table, 'b.parquet')", ["a.parquet"], ["b.parquet"]),
    ("np.load('a.npy')\nnp.save('b', x)\nnp.savez('c.npz', x=x)", ["a.npy"], ["b.npy", "c.npz"]),
    ("plt.savefig('plots/a.png')\nfig.savefig(fname='b.png')", [], ["plots/a.png", "b.png"]),
    ("Image.open('a.png').save('b.jpg')\nmodel.save('name')", ["a.png"], ["b.jpg"]),
    ("from shutil import copyfile as c\nc('a', 'b')", ["a"], ["b"]),
    ("shutil.move('a', 'b')\nos.replace('c', 'd')", ["a", "c"], ["b", "a", "d", "c"]),
    ("os.remove('a')\ndf.rename('x')\n'text'.replace('a', 'b')", [], ["a"]),
    ("sqlite3.connect('x.db')\nsqlite3.connect(':memory:')", ["x.db"], ["x.db"]),
    ("gzip.open('a.gz', 'wt')\nzipfile.ZipFile('b.zip')", ["b.zip"], ["a.gz"]),
    ("duckdb.sql(\"from 'a.csv' select *\")", ["a.csv"], []),
    ("con.execute(f\"COPY (SELECT * FROM '{t}.csv') TO 'b.parquet' (FORMAT parquet)\")", ["*.csv"], ["b.parquet"]),
    ("os.system('sort < a > b')\nsubprocess.run(['cp', 'c', 'd e'])", ["a", "c"], ["b", "d e"]),
    ("%%writefile made.py\nopen('not this')", [], ["made.py"]),
    ("%%writefile -a made.py\nx", [], ["made.py"]),
    ("%%bash\ncat a | tee b >> c 2> /dev/null", ["a"], ["c", "b"]),
    ("!sort {name}.txt > sorted.txt\nopen('a')", ["a"], ["sorted.txt"]),
    ("%cd sub\nopen('a')", ["sub/a"], []),
    ("os.chdir(where)\nopen('a')\nopen('/mnt/data/b')", ["b"], []),
    ("await f(open('a'))", ["a"], []),
    ("this is (no Python", [], []),
]


@pytest.mark.parametrize(("code", "inputs", "outputs"), READ_AND_WRITTEN)
def test_files_are_found_by_the_calls_that_touch_them(code: str, inputs: list[str], outputs: list[str]) -> None:
    seen = forecast(code)

    assert (seen.inputs, seen.outputs) == (inputs, outputs)


FOLDED = [
    ("base = 'out'\nopen(base + '/a.csv', 'w')", ["out/a.csv"]),
    ("base = '/mnt/data'\nopen(f'{base}/x/{day:%Y}.csv', 'w')", ["x/*.csv"]),
    ("open(os.path.join('out', name, 'a.csv'), 'w')", ["out/*/a.csv"]),
    ("open('part-%03d.csv' % i, 'w')", ["part-*.csv"]),
    ("open('part-{}.csv'.format(i), 'w')", ["part-*.csv"]),
    ("t = '{}.csv'\nopen(t.format(3), 'w')", ["*.csv"]),
    ("for n in ['a', 'b']:\n    open(n + '.csv', 'w')", ["a.csv", "b.csv"]),
    ("for i in range(9):\n    open(f'part-{i}.csv', 'w')", ["part-*.csv"]),
    ("out = 'a' if q else 'b'\nopen(out, 'w')", ["a", "b"]),
    ("out = 'a'\nif q:\n    out = 'b'\nopen(out, 'w')", ["a", "b"]),
    ("out = 'a'\nout = 'b'\nopen(out, 'w')", ["b"]),
    ("out = 'a'\nout += '.csv'\nopen(out, 'w')", ["a.csv"]),
    ("a, b = 'x', 'y'\nopen(b, 'w')", ["y"]),
    ("def save(path, n=1):\n    open(path, 'w')\nsave('a.csv')\nsave(path='b.csv')", ["a.csv", "b.csv"]),
    ("def never_called():\n    open('a', 'w')", []),
    ("open(whole_path, 'w')\nopen(f'{whole}', 'w')", []),
    ("for p in Path('in').glob('*.txt'):\n    (Path('out') / f'{p.stem}.csv').write_text('')", ["out/*.csv"]),
    ("open(live, 'w')", ["known.csv"]),
]


@pytest.mark.parametrize(("code", "outputs"), FOLDED)
def test_paths_are_put_together_as_far_as_the_code_shows(code: str, outputs: list[str]) -> None:
    assert forecast(code, {"live": "known.csv"}).outputs == outputs


FED: list[tuple[str, Flows]] = [
    ("df = pd.read_csv('a.csv')\ntop = df.head()\ntop.to_csv('b.csv')", {"b.csv": ["a.csv"]}),
    ("a = pd.read_csv('a')\nb = pd.read_csv('b')\na.to_csv('c')\nb.to_csv('d')", {"c": ["a"], "d": ["b"]}),
    (
        "a = pd.read_csv('a')\nb = pd.read_csv('b')\na.merge(b).to_csv('c')\na.to_csv('d')",
        {"c": ["a", "b"], "d": ["a"]},
    ),
    ("with open('a') as f, open('b', 'w') as g:\n    for line in f:\n        g.write(line)", {"b": ["a"]}),
    ("d = {}\nd['k'] = json.load(open('a'))\njson.dump(d, open('b', 'w'))", {"b": ["a"]}),
    ("w = csv.writer(open('b', 'w'))\nfor row in csv.reader(open('a')):\n    w.writerow(row)", {"b": ["a"]}),
    ("rows = []\nrows.append(open('a').read())\nopen('b', 'w').write(str(rows))", {"b": ["a"]}),
    ("x = 0\nx += len(open('a').read())\nopen('b', 'w').write(str(x))", {"b": ["a"]}),
    ("fig, ax = plt.subplots()\nax.plot(pd.read_csv('a').x)\nfig.savefig('b.png')", {"b.png": ["a"]}),
    ("pd.read_csv('a').plot()\nplt.savefig('b.png')", {"b.png": ["a"]}),
    ("sns.lineplot(data=pd.read_csv('a'))\nplt.savefig('b.png')", {"b.png": ["a"]}),
    ("parts = [pd.read_csv(p) for p in glob.glob('in/*')]\npd.concat(parts).to_csv('b')", {"b": ["in/*"]}),
    ("def load():\n    return pd.read_csv('a')\nload().to_csv('b')", {"b": ["a"]}),
    ("def save(df):\n    df.to_csv('b')\nsave(pd.read_csv('a'))", {"b": ["a"]}),
    ("con.execute(\"create table t as from 'a.csv'\")\ncon.execute(\"copy t to 'b.csv'\")", {"b.csv": ["a.csv"]}),
    ("shutil.copy('a', 'b')", {"b": ["a"]}),
    ("pd.read_csv('a').to_csv('t')\npd.read_csv('t').to_csv('b')", {"t": ["a"], "b": ["a"]}),
    ("df = pd.read_csv('a')\ndf = 1\nopen('b', 'w').write(str(df))", {}),
    ("df.to_csv('b')", {}),
]


@pytest.mark.parametrize(("code", "expected"), FED)
def test_flows_say_which_input_feeds_which_output(code: str, expected: Flows) -> None:
    assert flows(forecast(code)) == expected


def test_a_file_that_the_cell_makes_itself_is_no_input() -> None:
    seen = forecast("df.to_csv('t.csv')\npd.read_csv('t.csv').to_json('u.json')")

    assert seen.inputs == []
    assert seen.outputs == ["t.csv", "u.json"]


def test_a_cell_that_names_thousands_of_files_has_a_short_forecast() -> None:
    seen = forecast("\n".join(f"open('{n}', 'w').write(open('i{n}').read())" for n in range(1_000)))

    assert len(seen.inputs) == len(seen.outputs) == 200


SCRIPTS = [
    ("sort < in.txt | uniq -c > out.txt", Effect(reads=["in.txt"], writes=["out.txt"])),
    ("cp in.txt 'a b.txt'; touch c", Effect(reads=["in.txt"], writes=["a b.txt", "c"])),
    ("cat in.txt | tee d e >/dev/null 2>&1", Effect(reads=["in.txt"], writes=["d", "e"])),
    ("mv in.txt f && echo x >> g", Effect(reads=["in.txt"], writes=["f", "g"], removes=["in.txt"])),
    ("echo 'a > b' \"c > d\" # > e", Effect()),
    ("ls nowhere 2> err.log; rm in.txt", Effect(writes=["err.log"], removes=["in.txt"])),
]


@pytest.mark.parametrize(("script", "effect"), SCRIPTS)
def test_a_shell_script_does_what_was_forecast(script: str, effect: Effect, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x\n")
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False, capture_output=True)

    assert shell(script, Steps()) == effect
    assert {entry.name for entry in tmp_path.iterdir()} - {"in.txt"} == set(effect.writes)
    assert (tmp_path / "in.txt").exists() == ("in.txt" not in effect.removes)


@pytest.mark.parametrize(
    ("text", "effect"),
    [
        ("select * from 'a.csv' join 'b.csv' using (id)", Effect(reads=["a.csv", "b.csv"])),
        ("select * from read_csv_auto('a.csv', header = true)", Effect(reads=["a.csv"])),
        ("COPY t (x, y) FROM 'a.csv' (HEADER)", Effect(reads=["a.csv"])),
        ("attach 'x.db' as x", Effect(reads=["x.db"], writes=["x.db"])),
        ("select 'from' || x from t where d = 'to'", Effect()),
    ],
)
def test_sql_names_files(text: str, effect: Effect) -> None:
    assert sql(text, Steps()) == effect


AUDITED = """
import json, os, pathlib, shutil, sys
opened = []
sys.addaudithook(lambda event, args: opened.append((args[0], args[1])) if event == "open" else None)
exec(compile(sys.argv[1], "cell", "exec"))
seen = [(os.path.relpath(str(path)), mode) for path, mode in opened if isinstance(mode, str) and str(path)[:1] != "/"]
print(json.dumps([sorted({p for p, m in seen if "r" in m}), sorted({p for p, m in seen if "r" not in m})]))
"""
RUNNABLE = [
    "with open('in.txt') as f, open('out.txt', 'w') as g: g.write(f.read())",
    "from pathlib import Path\nt = Path('in.txt').read_text()\nfor n in 'ab', 'c':\n    Path(n + '.txt').write_text(t)",
    "import shutil\nshutil.copyfile('in.txt', 'copy.txt')",
    "def save(where, what):\n    with open(where, 'w') as f: f.write(what)\nsave('x.txt', open('in.txt').read())",
]


@pytest.mark.parametrize("code", RUNNABLE)
def test_python_opens_what_was_forecast(code: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x\n")
    command = [sys.executable, "-c", AUDITED, code]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, env=dict(os.environ))

    seen = forecast(code)

    assert done.stdout.strip() == str([seen.inputs, sorted(seen.outputs)]).replace("'", '"')
