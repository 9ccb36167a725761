"""A submitted study on real services: nobody gets in without a secret, and what breaks costs it nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.__main__ import write_tiny
from tests.faults.faults import Running, begin, check, several
from tests.faults.services import Services, lacking, refused

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    if reason := lacking():
        pytest.skip(reason)
    # Ray's sockets lie in it, whose paths may not be long.
    root = Path(tempfile.mkdtemp(prefix="rsf-"))
    root.chmod(0o711)
    try:
        with Services(root) as running:
            yield running
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> Running:
    with begin(services, write_tiny(services.root / "study"), "undisturbed") as study:
        assert study.end() == "SUCCEEDED"
    check(study, None)
    return study


def test_a_study_that_everything_happens_to_ends_as_the_undisturbed_one(undisturbed: Running) -> None:
    with begin(undisturbed.services, undisturbed.spec, "several") as study:
        study.wait_for_trials(2)
        several(study)
        assert study.end() == "SUCCEEDED"
        check(study, undisturbed)


def test_nobody_gets_in_without_or_with_a_wrong_secret(services: Services) -> None:
    experiments = f"{services.mlflow_uri}/api/2.0/mlflow/experiments/search?max_results=1"
    # A wrong token, and the password "x" of admin.
    for url, wrong in ((f"{services.address}/api/jobs/", "Bearer " + "x" * 64), (experiments, "Basic YWRtaW46eA==")):
        assert refused(url) == 401
        assert refused(url, wrong) in (401, 403)
    for variables in ({"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "x" * 64}, {"RAY_AUTH_TOKEN_PATH": ""}):
        done = services.ranksearch("list", "--address", services.address, **variables)
        assert done.returncode == 1 and "token" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_finds_all_well_with_the_secrets_and_says_what_lacks_without(services: Services) -> None:
    where = ("--address", services.address, "--tracking-uri", services.mlflow_uri)
    well = services.ranksearch("doctor", *where)
    assert well.returncode == 0, well.stdout
    assert "3 of 3 nodes alive" in well.stdout and "answers admin" in well.stdout
    ill = services.ranksearch("doctor", *where, MLFLOW_TRACKING_PASSWORD="wrong", RAY_AUTH_TOKEN_PATH="")
    assert ill.returncode == 1
    assert "refuses the login" in ill.stdout and "it got no token" in ill.stdout


def test_no_secret_stands_in_any_file(undisturbed: Running) -> None:
    assert undisturbed.services.leaked() == []
