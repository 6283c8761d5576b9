# SPDX-License-Identifier: Apache-2.0
"""From a cluster environment to what the ranks of one machine have in common."""

from fabric.plugins.environments import ClusterEnvironment
from fabric.processes.start import Job


def job_in(environment: ClusterEnvironment, *, launcher: str, store_port: int) -> Job:
    """The part of the job that this machine starts.

    Args:
        environment: The cluster, as this process sees it.
        launcher: Who starts the ranks, for messages.
        store_port: Port of the rendezvous store; 0 where rank 0 of this machine opens it on a free one.
    """
    return Job(
        launcher=launcher,
        cluster=environment.name,
        node_rank=environment.node_rank(),
        first_rank=environment.global_rank() - environment.local_rank(),
        world_size=environment.world_size(),
        local_world_size=environment.local_world_size(),
        store_host=environment.main_address,
        store_port=store_port,
    )
