"""Slurm, munge and the database for accounting from Debian. Nothing in /etc is used: the tests have their own files
(cluster/slurm.py)."""

from tests.cluster.part import apt_install


def install() -> None:
    apt_install("slurmctld", "slurmd", "slurm-client", "munge")
    apt_install("slurmdbd", "mariadb-server-core", "mariadb-client-core")
