"""No command writes or prints a secret: a canary given under many names must not appear in anything they leave."""

from __future__ import annotations

import dataclasses
import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from configs import QUICK
from trl import GRPOConfig

from rl_training.job.configuration.nested import flatten, load_plain
from rl_training.job.configuration.shipped import CONF, LAUNCH, PROBE_CONFIGS
from rl_training.records.files.masking import mask_arguments, mask_line, secrets_in, without_masks, without_secrets
from rl_training.records.files.secret_forms import MASK
from rl_training.records.files.secret_names import is_secret

CANARY = "kanarie5e7"
NAMES = (
    "token", "hub_token", "HF_TOKEN", "accessToken", "session_token", "api_key", "apikey", "X-Api-Key",
    "WANDB_API_KEY", "openai_key", "secret", "client_secret", "secretKey", "aws_secret_access_key", "access_key",
    "private_key", "ssh_key", "password", "PASSWD", "db_pwd", "passphrase", "auth", "Authorization", "credentials",
    "bearer", "cookie", "jwt", "user_jwt", "pin", "card_pin", "token_2", "hf_token2", "pat", "GITHUB_PAT", "webhook",
    "slack_webhook_url", "auth_1",
)  # fmt: skip
WORDS = [
    *(f"++data.{name}={CANARY}" for name in NAMES),
    f"++data.listed=[{{token: {CANARY}}},{{inner: {{password: {CANARY}}}}}]",
    f"++data.secrets=[{CANARY},{CANARY}]",
    f"++data.headers={{Authorization: 'Bearer {CANARY}'}}",
    f"++data.hook=https://hooks.slack.com/services/T0/B0/{CANARY}",
    f"++data.address='https://me:{CANARY}@host/path?token={CANARY}&n=1'",
]
TRAINED = [
    *QUICK, "probe=none", "trainer.max_steps=2", "++data.ends_its_run=true", f"trainer.hub_token={CANARY}",
    "++trainer.report_to=[wandb,tensorboard,trackio]",
]  # fmt: skip

ANALYZED = [
    "log.level=debug", "evaluation.prompts=4", "update.prompts=2", "memory.microbatch_size=8", "conditioning=false",
    "++trainer.report_to=[tensorboard]",
    "++data.ends_its_run=false", f"trainer.hub_token={CANARY}",
]  # fmt: skip
EVALUATED = ["evaluation.responses_per_prompt=2", "evaluation.kl=false", "++data.ends_its_run=false"]
MAIN = "rl_training/__main__.py"


@dataclasses.dataclass(frozen=True)
class Left:
    """The outcome of the commands: a folder with all that they wrote and printed, and how each ended."""

    folder: Path
    codes: dict[str, int]

    def said(self, command: str) -> str:
        return (self.folder / f"said_{command}").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Run a training that a signal ends after its first step, and every command that reads it, with the canaries."""
    folder = tmp_path_factory.mktemp("secrets")
    run, other = folder / "run", folder / "other"
    env = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "NETRC": str(folder / "netrc")}
    task = ["++data._target_=keyed_task.keyed"]
    commands = {
        "train": ["train.py", *task, *TRAINED, *WORDS, f"run_dir={run}"],
        "analyze": ["offline.py", f"checkpoint={run}", *task, *ANALYZED, *WORDS],
        "evaluate": ["tests/support/with_forked_children.py", "evaluate.py", f"run={run}", *task, *EVALUATED, *WORDS],
        "report": [MAIN, "report", str(run)],
        "compare": [MAIN, "report", str(run), str(other), "--out", str(folder)],
        "wrong": ["train.py", f"trainer.hub_token={CANARY}", "seed=x"],
        "debugged": ["train.py", f"trainer.hub_token={CANARY}", "seed=x", "--debug"],
        "unread": ["train.py", f"trainer.hub_token=a({CANARY}"],
        "listed": ["train.py", f"trainer.hub_token={CANARY},{CANARY}"],
        "swept": ["train.py", f"++trainer.hub_token={CANARY}", "seed=-1,-2", "-m", f"hydra.sweep.dir={folder}/swept"],
        "shown": ["train.py", *WORDS, f"trainer.hub_token={CANARY}", "--cfg", "job"],
    }  # fmt: skip
    codes = {}
    for name, command in commands.items():
        if name == "compare":
            shutil.copytree(run, other)
        ended = forks.run(*command, env=env)
        (folder / f"said_{name}").write_text(ended.stdout + ended.stderr, encoding="utf-8")
        codes[name] = ended.returncode
    return Left(folder, codes)


def files_with(canary: str, folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if canary.encode() in (gzip.decompress(content) if path.suffix == ".gz" else content):
                yield path


def test_no_command_writes_or_prints_a_secret(left: Left) -> None:
    """Not in its folder, not in those of dashboards, and not on a terminal."""
    expected = {"train": 143, "wrong": 2, "debugged": 2, "unread": 2, "listed": 2, "swept": 2}
    assert left.codes == {name: expected.get(name, 0) for name in left.codes}, [*map(left.said, left.codes)]
    written = {path.name for path in left.folder.rglob("*")}
    assert written >= {"config.yaml", "result.json", "settings.json", "report.html", "comparison.html", "wandb"}
    assert any(name.startswith("events.out.tfevents") for name in written)
    assert not [
        path for folder in (left.folder, Path(os.environ["TRACKIO_DIR"])) for path in files_with(CANARY, folder)
    ]


def test_the_printed_command_to_resume_contains_no_secret(left: Left) -> None:
    line = left.said("train").splitlines()[-1]
    assert line.endswith(" resume=latest")
    assert "hub_token" not in line
    assert "api_key" not in line


def test_an_error_about_a_masked_override_names_its_key(left: Left) -> None:
    for name in ("unread", "listed"):
        assert f"trainer.hub_token={MASK}" in left.said(name), left.said(name)
    assert "seed=x" in left.said("wrong")
    assert "Traceback" in left.said("debugged")


def test_settings_keep_everything_but_secrets(left: Left) -> None:
    shown = left.said("shown")
    assert "num_generations: " in shown
    assert shown.count(MASK) >= len(NAMES)


MORE_NAMES = (
    "access_token", "refresh_token", "id_token", "csrf_token", "xsrf_token", "oauth_token", "personal_access_token",
    "github_token", "gitlab_token", "slack_token", "discord_token", "telegram_bot_token", "npm_token", "pypi_token",
    "wandb_token", "neptune_api_token", "civitai_token", "vault_token", "consul_http_token", "sentry_token",
    "cloudflare_api_token", "twilio_auth_token", "deploy_token", "ci_job_token", "registration_token",
    "security_token", "X-Auth-Token", "X-Vault-Token", "authToken", "accessTokens", "openai_api_key",
    "anthropic_api_key", "anthropic_key", "gemini_key", "google_api_key", "mistral_key", "cohere_key", "groq_key",
    "replicate_key", "together_key", "deepseek_key", "azure_key", "azure_openai_key", "account_key", "storage_key",
    "storage_account_key", "subscription_key", "Ocp-Apim-Subscription-Key", "access_key_id", "aws_access_key_id",
    "secret_key", "minio_access_key", "s3_key", "gcs_key", "gcp_key", "privatekey", "rsa_key", "sshkey", "gpg_key",
    "pem_key", "tls_key", "ssl_key", "client_key", "server_key", "encryption_key", "decryption_key", "aes_key",
    "fernet_key", "hmac_key", "signing_key", "master_key", "root_key", "admin_key", "app_key", "application_key",
    "license_key", "wandb_key", "comet_key", "mlflow_key", "swanlab_key", "langsmith_key", "serper_key",
    "tavily_key", "search_key", "judge_key", "stripe_key", "sendgrid_key", "maps_key", "datadog_key",
    "rapidapi_key", "webhook_key", "accountkey", "accesskey", "masterkey", "SharedAccessKey", "apiKeys", "pass",
    "db_pass", "dbpass", "smtp_pass", "mysql_pass", "userpass", "user_pass", "sshpass", "root_pass", "redis_pass",
    "ftp_pass", "login_pass", "PGPASSWORD", "mysql_pwd", "passcode", "pass_code", "pass_phrase", "pw",
    "db_password_1", "htpasswd", "proxy_password", "oauth", "oauth2", "oauth_secret", "oauthToken", "otp", "totp",
    "otp_code", "otp_secret", "mfa_code", "recovery_code", "backup_codes", "sas", "sas_token", "sas_url", "session",
    "session_id", "sessionid", "PHPSESSID", "session_cookie", "csrf", "set-cookie", "http_cookie",
    "connection_string", "connectionString", "conn_string", "conn_str", "connstr", "dsn", "sentry_dsn",
    "AZURE_STORAGE_CONNECTION_STRING", "creds", "aws_creds", "credential", "google_credentials",
    "application_credentials", "service_account_json", "client_secret", "clientsecret", "shared_secret",
    "app_secret", "hmac_secret", "seed_phrase", "mnemonic", "proxy_auth", "basic_auth", "auth_header",
    "authorization_code", "account_sid", "gh_pat", "azure_pat", "user_jwt", "id_jwt", "kubeconfig",
)  # fmt: skip


# --- which names mean secrets, and what is masked in a text -----------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES])
def test_a_secret_is_recognized_by_its_name_in_any_case_and_at_any_depth(name: str) -> None:
    for written in (name, name.lower(), name.upper(), name.replace("_", "-")):
        if written.upper() != name.upper().replace("_", "") or "_" in name or "-" in name or written == name:
            assert is_secret(written), written
            assert without_secrets({"a": [{"b": {written: "s"}}]}) == {"a": [{"b": {written: MASK}}]}
            assert mask_arguments([f"++a.b.{written}=s", f"--{written}", "s"]) == [
                f"++a.b.{written}={MASK}",
                f"--{written}",
                MASK,
            ]


@pytest.mark.parametrize("name", ["hub_token", "db_pass", "judge_key", "oauth", "credentials", "session", "pin"])
def test_everything_below_the_name_of_a_secret_is_masked(name: str) -> None:
    """In nested settings of any kind, in a pair, after a flag, and beside the name in an entry of its own."""
    below = {"value": "s", "write": ["s", {"id": 7, "on": True}], "none": None, "pairs": (("a", "s"),), "set": {"s"}}
    assert without_secrets({"a": {name: below}}) == {
        "a": {
            name: {
                "value": MASK, "write": [MASK, {"id": MASK, "on": True}], "none": None, "pairs": ((MASK, MASK),),
                "set": {MASK},
            }
        }
    }  # fmt: skip
    assert without_secrets({"env": [[name, "s"], ("n", "t")]}) == {"env": [[name, MASK], ("n", "t")]}
    assert without_secrets({"args": [f"--{name}", "s", "--n", "2"]}) == {"args": [f"--{name}", MASK, "--n", "2"]}
    entry = {"name": name, "value": "s", "n": 1}
    assert without_secrets({"env": [entry, {"name": "n", "value": "t"}]}) == {
        "env": [entry | {"value": MASK}, {"name": "n", "value": "t"}]
    }


LETTERS = "Ab3dEf6hIj9lMn2pQr5tUv8xYz1"
FORMS = {
    f"Bearer {LETTERS}": "Bearer ***",
    "Basic dXNlcjpwYXNz": "Basic dXNlcjpwYXNz",  # alone and without digit or padding it could be prose
    "Basic dXNlcjpwYXNzMQ==": "Basic ***",
    f"curl -H 'Authorization: Bearer {LETTERS}' x": "curl -H 'Authorization: Bearer ***' x",
    f"log in with hf_{LETTERS}": "log in with ***",
    **{
        f"{prefix}{LETTERS}": MASK
        for prefix in ("hf_", "sk-", "sk-proj-", "sk-ant-api03-", "sk_live_", "ghp_", "gho_", "github_pat_", "glpat-",
                       "xoxb-1-", "AIzaSy", "npm_", "pypi-AgEI", "gsk_", "r8_", "nvapi-")
    },
    "AKIAIOSFODNN7EXAMPLE": MASK,
    f"eyJhbGciOi.eyJzdWIi.{LETTERS}": MASK,
    "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----": MASK,
    "https://maps.host/api?q=1&key=S": "https://maps.host/api?q=1&key=***",
    "see https://host/x?api_key=S&n=1": "see https://host/x?api_key=***&n=1",
    "https://x.blob.host/c?sv=2024&se=2030&sig=S%3D": "https://x.blob.host/c?sv=2024&se=2030&sig=***",
    "postgres://me:pa/ss@host/db": "postgres://***@host/db",
    "mongodb+srv://me:S@host/db?retry=1": "mongodb+srv://***@host/db?retry=1",
    "jdbc:postgresql://host/db?user=me&password=S": "jdbc:postgresql://host/db?user=me&password=***",
    "Server=h;Database=d;User Id=me;Password=S;": "Server=h;Database=d;User Id=me;Password=***;",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=S==;EndpointSuffix=x": (
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=***;EndpointSuffix=x"
    ),
    "Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey=S=": (
        "Endpoint=sb://h/;SharedAccessKeyName=***;SharedAccessKey=***"
    ),
    "host=h dbname=d user=me password=S": "host=h dbname=d user=me password=***",
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_a_secret_is_recognized_by_its_form_whatever_its_setting_is_called(text: str) -> None:
    """In settings, in a command line and in a line for people."""
    assert without_secrets({"note": [text]}) == {"note": [FORMS[text]]}
    assert mask_arguments([text]) == [FORMS[text]]
    assert mask_arguments([f"a.note={text}"]) == [f"a.note={FORMS[text]}"]
    if FORMS[text] == MASK:
        assert mask_line(f"401 for {text}") == "401 for ***"
        assert [*without_secrets({text: 1})] == [MASK]


@pytest.mark.parametrize("word", [f"--header=Token {LETTERS}", f"Bearer {LETTERS}", f"curl -H 'Basic {LETTERS}'"])
def test_the_secret_of_a_header_on_the_command_line_is_masked_wherever_else_it_stands(word: str) -> None:
    known = secrets_in([word], {})
    assert LETTERS not in mask_line(f"401 for {LETTERS} at host", known)


@pytest.mark.parametrize(
    "text",
    [
        "hf_transformers", "sk-learn", "sk-learn-random-forest", "Basic arithmetic", "Bearer of good news; a=b",
        "https://host:8080/path@v1.2", "git+https://github.com/me/it@v1", "Is f?key an x=1; or y=2 and no more?",
        "x = 1; y = 2 * x", "lr=1 beta=2 eps=3", "r8_x", "a/b?c", "eyJ.x",
    ],
)  # fmt: skip
def test_a_text_without_a_secret_is_kept(text: str) -> None:
    assert without_secrets({"note": text}) == {"note": text}


def test_of_trainer_and_conf_settings_only_the_hub_token_is_masked() -> None:
    """Whatever their values are. Nothing in the shipped files is a secret."""
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert {name for name in fields if is_secret(name, "text")} == {"hub_token"}
    files = [path for folder in (CONF, LAUNCH, PROBE_CONFIGS) for path in folder.rglob("*.yaml")]
    assert len(files) > 30
    for path in files:
        settings = load_plain(path)
        assert not [key for key in flatten(settings) if is_secret(key, "text")], path
        assert without_secrets(settings) == settings, path


OTHERS = (
    "tokenizer", "tokenizer_name", "max_tokens", "num_tokens", "eos_token", "pad_token", "bos_token", "pad_token_id",
    "token_classes", "image_token", "stop_token", "max_new_tokens", "per_token", "author", "authors", "keys",
    "sort_key", "answer_key", "key", "passes", "pass_at_k", "compass", "secretary", "monkey", "pin_memory", "path",
    "spin", "patience", "eos_token_2", "tokens_2", "step_2", "hook", "prompt_key", "image_key", "reward_fn_key",
    "text_key", "monkeys", "turkey", "bypass", "forward_pass", "max_pass", "num_passes", "sessions", "assassin", "sash",
    "bottom", "option", "side", "string", "connection", "hotkey", "keyboard", "seed", "accredited", "author_name",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_that_only_resembles_one_is_not_masked(name: str) -> None:
    assert not is_secret(name, "text")
    assert without_secrets({name: "text", "a": {name: ["text"]}}) == {name: "text", "a": {name: ["text"]}}
    assert mask_arguments([f"a.{name}=text"]) == [f"a.{name}=text"]


def test_special_tokens_booleans_and_null_are_never_masked() -> None:
    settings = {"my_token": "<|sep|>", "other_token": "[SEP]", "token": True, "password": None, "auth": False}
    assert without_secrets(settings) == settings
    assert without_secrets({"password": 123456}) == {"password": MASK}


@pytest.mark.parametrize(
    ("word", "masked"),
    [
        ("a.kw={token: S, x: 1}", "a.kw={token: ***, x: 1}"),
        ("a.kw=[{x: 1}, {'api-key': \"S\"}]", "a.kw=[{x: 1}, {'api-key': ***}]"),
        ("data.path=https://me:S@host/x", "data.path=https://***@host/x"),
        ("data.path=https://host/x?token=S&n=1", "data.path=https://host/x?token=***&n=1"),
        ("data.path=https://host/x?X-Amz-Signature=S", "data.path=https://host/x?X-Amz-Signature=***"),
        ("a.u=https://hooks.slack.com/services/T/B/S", "a.u=https://hooks.slack.com/***"),
        ("a.u=https://discord.com/api/webhooks/1/S", "a.u=https://discord.com/api/webhooks/***"),
        ("a.u=https://x.webhook.office.com/webhookb2/S", "a.u=https://x.webhook.office.com/***"),
        ("a.u=https://api.telegram.org/bot1:S/sendMessage", "a.u=https://api.telegram.org/bot***"),
        ("a.u=https://github.com/me/hooks/tree", "a.u=https://github.com/me/hooks/tree"),
        ("++a.secret=x=y z", "++a.secret=***"),
        ("data.path=s3://bucket/key=1/x", "data.path=s3://bucket/key=1/x"),
        ("run_dir=runs/token=5", "run_dir=runs/token=5"),
        ("seed=1", "seed=1"),
    ],
)
def test_secrets_inside_an_override_are_masked_and_the_rest_is_kept(word: str, masked: str) -> None:
    assert mask_arguments([word]) == [masked]
    assert without_secrets({"run": [word]}) == {"run": [masked]}


def test_the_word_after_a_secret_flag_is_masked_unless_the_flag_has_a_value() -> None:
    assert mask_arguments(["--password", "S", "seed=1"]) == ["--password", "***", "seed=1"]
    assert mask_arguments(["--password=S", "seed=1"]) == ["--password=***", "seed=1"]


def test_a_prompt_template_in_settings_is_never_masked() -> None:
    """The settings must allow rebuilding the run."""
    prompt = "The password: {password}. Say token=5 or {token: 5}; write to me@host."
    assert without_secrets({"template": prompt}) == {"template": prompt}


def test_an_error_line_is_masked_after_secret_names_and_at_known_secret_values() -> None:
    assert mask_line("x.token='a b': no such setting") == "x.token=***: no such setting"
    assert mask_line("{'token': 'S', 'n': 1}") == "{'token': ***, 'n': 1}"
    assert mask_line("the tokenizer has no end-of-sequence token: set its eos_token") == (
        "the tokenizer has no end-of-sequence token: set its eos_token"
    )
    words, environment = (
        ["a.hub_token=typed99", "p=https://me:paSSw0rd@h"],
        {"HF_TOKEN": "hf_abcdef", "PWD": os.getcwd()},
    )
    known = secrets_in(words, environment)
    said = f"401 for typed99 and hf_abcdef at https://me:paSSw0rd@h, paSSw0rd in {os.getcwd()}"
    assert mask_line(said, known) == f"401 for *** and *** at https://***@h, *** in {os.getcwd()}"
    assert mask_line("401 for typed99 and typed99-more", ["typed99", "typed99-more"]) == "401 for *** and ***"


def test_masked_settings_are_dropped_when_read_back() -> None:
    settings = {"hub_token": "S", "kw": [{"token": "S", "n": 1}], "n": 2}
    assert without_masks(without_secrets(settings)) == {"kw": [{"n": 1}], "n": 2}
