"""The configuration files of a node's daemons, as text: what is unusual says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.certificates import KeyPair
from tests.cluster.control_plane import Pki
from tests.cluster.process import ClusterError

NODE_NAME = "job-reaper-node"
# In a network namespace of its own these collide with nothing. The bridge's address is the node's.
BRIDGE = "jr0"
NODE_ADDRESS = "10.198.0.1"
POD_NETWORK = "10.198.0.0/16"
API_PORT = 6443
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "job-reaper.test/pause:1"
CNI_PLUGINS = ("bridge", "host-local", "loopback")
CNI_PLACES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))


def cni_directory() -> Path:
    """Where the distribution put the CNI plugins."""
    for place in CNI_PLACES:
        if all((place / name).exists() for name in CNI_PLUGINS):
            return place
    raise ClusterError(
        f"no CNI plugins in {', '.join(map(str, CNI_PLACES))}; install containernetworking-plugins"
    )


def containerd(cni_config: Path) -> str:
    """For containerd 1.6 and 1.7.

    Without CAP_SYS_RESOURCE no sandbox starts unless the oom score is restricted.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper",
]

[grpc]
address = "{CONTAINERD_SOCKET}"

[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true

[{cri}.cni]
bin_dir = "{cni_directory()}"
conf_dir = "{cni_config}"

[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def cni() -> str:
    """One bridge, one subnet; no masquerading, because there is nowhere to go."""
    plugin = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni-addresses",
            "ranges": [[{"subnet": POD_NETWORK, "rangeStart": "10.198.1.0", "gateway": NODE_ADDRESS}]],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "job-reaper", "plugins": [plugin]}, indent=2)


def kubelet(pki: Pki, serving: KeyPair, group: str, resolv_conf: Path, plugins: Path) -> str:
    """Short leases: a stopped kubelet is noticed in seconds. No eviction because a disk is full."""
    return _yaml(
        apiVersion="kubelet.config.k8s.io/v1beta1",
        kind="KubeletConfiguration",
        address=NODE_ADDRESS,
        authentication={
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.authority.cert)},
        },
        authorization={"mode": "Webhook"},
        tlsCertFile=str(serving.cert),
        tlsPrivateKeyFile=str(serving.key),
        containerRuntimeEndpoint=f"unix://{CONTAINERD_SOCKET}",
        cgroupDriver="cgroupfs",
        cgroupRoot=f"/{group}",
        failCgroupV1=False,
        failSwapOn=False,
        evictionHard={"memory.available": "20Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        imageGCHighThresholdPercent=100,
        nodeLeaseDurationSeconds=8,
        nodeStatusUpdateFrequency="2s",
        # Mounted ConfigMaps follow an edit within this time; a minute (the default) would be slow.
        syncFrequency="5s",
        configMapAndSecretChangeDetectionStrategy="Watch",
        # Names are not resolved in this cluster, and never by the machine's resolver.
        resolvConf=str(resolv_conf),
        volumePluginDir=str(plugins),
        healthzPort=0,
    )


def kube_proxy(kubeconfig: Path) -> str:
    """nftables, everything masqueraded: pods of one bridge would else answer each other past the way back.

    The conntrack table's size is the machine's, not the namespace's: hands off.
    """
    return _yaml(
        apiVersion="kubeproxy.config.k8s.io/v1alpha1",
        kind="KubeProxyConfiguration",
        clientConnection={"kubeconfig": str(kubeconfig)},
        mode="nftables",
        clusterCIDR=POD_NETWORK,
        hostnameOverride=NODE_NAME,
        nftables={"masqueradeAll": True, "minSyncPeriod": "0s"},
        conntrack={
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        oomScoreAdj=0,
        healthzBindAddress="127.0.0.1:10256",
        metricsBindAddress="127.0.0.1:10249",
    )


def _yaml(**document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False)
