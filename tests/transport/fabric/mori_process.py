"""What processes of the tests of the mori fabric do: how their ends are made, and what an owner of memory is told."""

from kvbaton.transport import create
from kvbaton.transport.fabric.mori.adapter import MoriFabric


def engine(options, instance):
    return MoriFabric(instance, options)


def transport(executor, options, instance):
    return create("mori", instance=instance, options={"executor": executor, **options})


def take_away(fabric, region):
    """For an owner: deregister the memory of a region."""
    engine = fabric._engine
    engine.engine.deregister_memory(engine.memories[fabric._regions[region].memory])


def taken_port(port, connection):
    """Whether a port that is taken is refused, rather than the end of this process."""
    try:
        MoriFabric("one", {"port": str(port)})
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send("it was made")
