"""Names that tools of the host run, or obey, by themselves: a hook, a shell's start file, an editor's settings.

One criterion decides: a user enters the directory, or uses a common tool there, and does not ask for this file. All the
same the file makes that tool run something, or makes it send something to another place. No run publishes such a file
into a directory of the user's, unless the user names it exactly (`publication`).

Not listed is what the user starts by a command for that very purpose: a script, a module, a Makefile, a Dockerfile, a
list of packages to install. Nor is a setting that cannot run anything: `.gitignore`, `.editorconfig`.

1. A name is protected at any depth, and so is all that is below it.
2. Names are compared as the most forgiving file systems do: case, width, composition, invisible characters, dots and
   spaces at the end, and what follows a colon make no difference.
3. A directory may be protected by what is in it and not by its name: see `protected_places`.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import lru_cache

PROTECTED: Mapping[str, tuple[str, ...]] = {
    "version control": (
        ".git", "git~[0-9]*", "HEAD", ".gitattributes", ".gitmodules", ".gitconfig", ".git-credentials", ".lfsconfig",
        ".hg", ".hgrc", ".hgsub", ".svn", ".bzr", ".jj", ".sl", "_darcs", ".fslckout", "_fossil_", ".repo",
        ".gitreview", ".arcconfig",
    ),
    "hooks": (
        ".husky", ".huskyrc*", ".githooks", "githooks", ".git-hooks", ".hooks", ".pre-commit-config.y*ml",
        ".pre-commit-hooks.y*ml", "prek.toml", "lefthook*.y*ml", "lefthook*.toml", "lefthook*.json", ".lefthook*",
        ".lintstagedrc*", "lint-staged.config.*", ".simple-git-hooks.*", "simple-git-hooks.*", ".overcommit.yml",
        ".commitlintrc*", "commitlint.config.*",
        # The user's `core.hooksPath` may name any directory, so Git's hooks are known by their own names too.
        "applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg",
        "commit-msg", "post-commit", "pre-rebase", "post-checkout", "post-merge", "pre-push", "pre-receive",
        "proc-receive", "post-receive", "post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc",
        "post-rewrite", "sendemail-validate", "fsmonitor-watchman", "post-index-change", "p4-changelist",
        "p4-prepare-changelist", "p4-post-changelist", "p4-pre-submit",
    ),
    "services that run what is pushed": (
        ".github", ".gitlab", ".gitlab-ci.y*ml", ".circleci", ".travis.y*ml", ".drone.y*ml", ".buildkite",
        ".woodpecker", ".woodpecker.y*ml", ".gitea", ".forgejo", ".azure-pipelines", "azure-pipelines.y*ml",
        "bitbucket-pipelines.y*ml", "appveyor.y*ml", ".appveyor.y*ml", ".cirrus.y*ml", ".cirrus.star", ".semaphore",
        ".teamcity", "Jenkinsfile", "cloudbuild.y*ml", "buildspec.y*ml", "netlify.toml", "vercel.json",
        ".readthedocs.y*ml", ".builds", ".build.yml", ".tekton", ".dagger",
    ),
    "shells": (
        ".bash*", ".profile", ".zsh*", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".mkshrc", ".*cshrc", ".login",
        ".logout", ".inputrc", ".hushlogin", "*.fish", ".oh-my-*", ".xinitrc", ".xsession*", ".xprofile", ".xserverrc",
        ".xresources", ".pam_environment", ".shrc", ".rc", ".screenrc", ".tmux.conf", ".tmux", ".byobu", ".wgetrc",
        ".curlrc", "Microsoft.*profile.ps1", "profile.ps1",
        ".lessfilter", ".lesskey", ".tmuxinator*",
    ),
    "what entering a directory loads": (
        ".envrc", ".direnv", ".env", ".env.*", ".autoenv*", ".autorc", ".tool-versions", ".asdfrc", "mise*.toml",
        ".mise*", "mise", ".rtx*.toml", ".python-version", ".node-version", ".nvmrc", ".ruby-version", ".ruby-gemset",
        ".rvmrc", ".rbenv*", ".java-version", ".sdkmanrc", ".go-version", ".terraform-version", ".nvm", ".pyenv",
        ".venv", "pyvenv.cfg", "rust-toolchain*", ".devbox", "devbox.json", "devenv.*", ".devenv*", "flox.*", ".flox",
        "site-packages", "dist-packages", "pixi.toml", ".pixi",
    ),
    "editors": (
        ".vscode*", "*.code-workspace", ".idea", "*.iml", ".run", ".fleet", ".vs", ".zed", "*.sublime-project",
        "*.sublime-workspace", ".vim*", ".exrc", "_vimrc", "_exrc", ".nvim*", ".gvimrc", ".lvimrc", ".local.vimrc",
        ".emacs*", ".dir-locals*.el", ".projectile", ".helix", ".kakrc", ".nanorc", ".settings", ".project",
        ".classpath", ".factorypath", ".pydevproject", ".spyproject", ".theia", ".nova", ".devcontainer*",
        ".gitpod*", ".idx", ".replit", "replit.nix", ".ycm_extra_conf.py", ".clangd", ".ccls", ".vimspector.json",
        "Session.vim", ".luarc.json*", ".merlin", "hie.yaml", ".tern-project", ".solargraph.yml",
    ),
    "Python": (
        "sitecustomize", "sitecustomize.*", "usercustomize", "usercustomize.*", "*.pth", "*._pth", "*.start",
        "conftest", "conftest.*", ".pythonrc*", ".pythonstartup*", ".ipython", "ipython_*config.*", ".jupyter",
        "jupyter_*config.*", ".pdbrc*", ".pypirc", "pip.conf", "pip.ini", ".pip", ".condarc", ".pylintrc*", "pylintrc*",
        ".mypy.ini", "mypy.ini", ".flake8", "matplotlibrc",
        "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml",
        ".coveragerc*", ".pydistutils.cfg", "uv.toml", "poetry.toml", "pdm.toml", ".pdm.toml", "hatch.toml",
        "Pipfile",
    ),
    "JavaScript": (
        ".npmrc", ".yarnrc*", ".yarn", ".pnpmfile.*", ".pnp.*", ".bunfig.toml", "bunfig.toml", ".bowerrc",
        "node_modules", ".eslintrc*", "eslint.config.*", ".prettierrc*", "prettier.config.*", ".stylelintrc*",
        "stylelint.config.*", ".babelrc*", "babel.config.*", ".postcssrc*", "postcss.config.*", "tailwind.config.*",
        ".watchmanconfig", ".mocharc*",
        "package.json", "pnpm-workspace.yaml", "deno.json*", "tsconfig*.json", "jsconfig*.json", "*.config.js",
        "*.config.cjs", "*.config.mjs", "*.config.ts", "*.config.cts", "*.config.mts", ".swcrc", ".parcelrc",
    ),
    "other languages and tools": (
        ".cargo", ".mvn", ".gradle", ".sbtopts", ".jvmopts", ".bundle", ".irbrc", ".pryrc", ".gemrc", ".rspec",
        ".rubocop.yml", ".Rprofile", ".Renviron", ".RData", ".julia", ".octaverc", "startup.m", ".ghci", ".ocamlinit",
        ".iex.exs", ".erlang", ".user.ini", ".htaccess", ".htpasswd", ".gdbinit*", ".gdb", ".lldbinit*", ".sqliterc",
        ".psqlrc", ".my.cnf", ".duckdbrc", "ansible.cfg", ".ansible.cfg", ".terraformrc", ".docker", ".bazelrc",
        ".bazeliskrc", ".bazelversion", ".buckconfig*", ".rpmmacros", ".latexmkrc", "latexmkrc", ".mailcap", ".forward",
        ".procmailrc", ".pinerc", ".muttrc", ".perltidyrc", ".perlcriticrc", ".proverc", ".valgrindrc", ".strace*",
        # make takes GNUmakefile in place of a Makefile that looks untouched.
        "GNUmakefile", ".gdbearlyinit*", ".simplecov", ".php-cs-fixer*", "phpstan*.neon*", "phpunit*.xml*",
        ".golangci*", ".tflint.hcl", ".terraform", "compose.override.y*ml", "docker-compose.override.y*ml",
    ),
    "agents": (
        ".claude*", "CLAUDE*.md", ".mcp.json", "mcp.json", ".mcp", ".mcpb", "AGENT.md", "AGENTS*.md", ".agents",
        ".agent", ".cursor*", ".windsurf*", ".codeium*", ".aider*", ".continue*", ".codex*", ".gemini*", "GEMINI.md",
        ".copilot*", "copilot-instructions.md", ".roo*", ".kilocode*", ".cline*", ".junie", ".kiro*", ".amazonq*",
        ".augment*", ".goose*", ".opencode*", "opencode.json*", ".crush*", "CRUSH.md", ".trae", ".qwen*", "QWEN.md",
        ".qodo", ".amp", ".factory", ".openhands*", ".tabnine*", ".zencoder", ".warp", "WARP.md", ".rules", "SKILL.md",
    ),
    "keys and accounts": (
        ".ssh", ".gnupg", ".netrc", "_netrc", ".aws", ".azure", ".gcloud", ".kube", ".pgpass", ".boto", ".s3cfg",
        ".password-store", "authorized_keys*",
    ),
    "the desktop and the system": (
        ".config", ".local", "autostart", "*.desktop", ".directory", "systemd", "environment.d", "*.service", "*.timer",
        "LaunchAgents", "autorun.inf", "desktop.ini", ".Trash*", "crontab",
    ),
    "Holdfast": (".holdfast",),
}  # fmt: skip

_BYTECODE = ("__pycache__", "*.pyc", "*.pyo")
_CACHES = (
    *_BYTECODE, ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".numba_cache",
    "*.nbi", "*.nbc",
)  # fmt: skip
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def is_protected(path: str) -> bool:
    """
    >>> is_protected("sub/.Git/hooks/pre-commit"), is_protected("data/report.csv"), is_protected(".gitignore")
    (True, False, False)
    """
    return any(_is_listed(name) for name in path.split("/"))


def is_bytecode(path: str) -> bool:
    """Code that Python runs in place of a source which looks untouched."""
    return any(_is_bytecode(name) for name in path.split("/"))


def is_cache(path: str) -> bool:
    """What a tool left by the way and makes again: not what anybody runs a job for."""
    return any(_is_cache(name) for name in path.split("/"))


def folded(name: str) -> str:
    """A name as the most forgiving file system compares it.

    >>> folded(".G\u200dIT. "), folded("\uff0egit::$INDEX_ALLOCATION")
    ('.git', '.git')
    """
    if not name.isascii():
        name = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        name = "".join(c for c in _INVISIBLE.sub("", name) if unicodedata.category(c) != "Cf")
    return name.casefold().partition(":")[0].rstrip(". \t")


def _any_of(patterns: Iterable[str]) -> "re.Pattern[str]":
    return re.compile("|".join(translate(pattern.casefold()) for pattern in patterns))


_LISTED = _any_of(pattern for patterns in PROTECTED.values() for pattern in patterns)
_OF_BYTECODE, _OF_CACHES = _any_of(_BYTECODE), _any_of(_CACHES)


@lru_cache(maxsize=4096)
def _is_listed(name: str) -> bool:
    return _LISTED.match(folded(name)) is not None


@lru_cache(maxsize=4096)
def _is_bytecode(name: str) -> bool:
    return _OF_BYTECODE.match(folded(name)) is not None


@lru_cache(maxsize=4096)
def _is_cache(name: str) -> bool:
    return _OF_CACHES.match(folded(name)) is not None
