# PostgreSQL for the compose file, where its own image cannot be pulled: the same variables, user and folder.
ARG BASE
FROM ${BASE}
COPY postgres_entrypoint.sh /usr/local/bin/entrypoint
RUN chmod 755 /usr/local/bin/entrypoint \
    && install --directory --owner postgres --group postgres /var/lib/postgresql/data /run/postgresql
ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin PGDATA=/var/lib/postgresql/data/db
USER postgres
ENTRYPOINT ["/usr/local/bin/entrypoint"]
