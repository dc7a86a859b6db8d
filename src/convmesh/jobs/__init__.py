"""What starts a run on a cluster: batch scripts, manifests, entry points, and supervisors over ssh."""

from convmesh.jobs.cluster_job import ClusterJob
from convmesh.jobs.kubernetes_manifest import kubernetes_manifest
from convmesh.jobs.over_ssh import hosts_in, start_over_ssh
from convmesh.jobs.ray_script import ray_script
from convmesh.jobs.slurm_script import slurm_script

__all__ = ["ClusterJob", "hosts_in", "kubernetes_manifest", "ray_script", "slurm_script", "start_over_ssh"]
