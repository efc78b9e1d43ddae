"""The ranks of the tests, which are forks of torchrun (tests/harness/forked.py), are like processes of their own."""


def test_a_rank_and_its_forks_have_the_same_files(run_torchrun):
    result = run_torchrun(2, script="tests/distributed/check_forks.py")
    assert result.returncode == 0, result.text
