"""The process that forks for runs, with nothing imported and an engine that does what PREFECT__TEST says."""

from deployments.workers import warm_process

if __name__ == "__main__":
    warm_process._IMPORTED = warm_process._IMPORTED_LATER = ()
    warm_process._ENGINE = "tests.fakes.run_engine"
    warm_process._MODULE = "tests.fakes.warm_source"
    warm_process.main()
