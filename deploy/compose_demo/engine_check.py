"""Whether there is a container engine here, and a compose."""

from command import Failed, run, say, succeeds

COMPOSES = (["docker", "compose"], ["docker-compose"])


def compose_command() -> list[str]:
    """How compose is called here. Raises Failed where there is no engine, or no compose."""
    try:
        version = run(["docker", "version", "--format", "{{.Server.Version}}"]).strip()
    except Failed as error:
        why = str(error).splitlines()[-1]
        raise Failed(
            f"no container engine answers ({why}). Install one (Debian: apt-get install docker.io docker-compose), "
            "start it, or point DOCKER_HOST to it, and run this again"
        ) from error
    for compose in COMPOSES:
        if succeeds([*compose, "version"]):
            say(f"docker {version}, {' '.join(compose)} {run([*compose, 'version', '--short']).strip()}")
            return compose
    raise Failed("docker answers, but there is neither docker compose nor docker-compose")
