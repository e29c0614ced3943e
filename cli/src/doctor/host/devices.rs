//! GPUs, the libraries that use them, and network devices with RDMA.

use std::path::{Path, PathBuf};

use super::{finding::Finding, root::Host};

/// The oldest driver that runs CUDA 12.
const MIN_DRIVER: u32 = 525;

const NVIDIA: &str = "0x10de";
/// Class codes of display controllers begin with it.
const DISPLAY: &str = "0x03";

/// Where the loader looks anyway, and where CUDA and the images of Baton put libraries.
const FOLDERS: [&str; 10] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/opt/cuda/lib",
    "/opt/nixl/.nixl_cu12.mesonpy.libs",
];

/// A device with RDMA.
pub(super) struct FabricDevice {
    name: String,
    /// "port 1 InfiniBand 400 Gb/s", of ports that are up.
    active: Vec<String>,
    /// "port 2 is down", of the others.
    inactive: Vec<String>,
}

/// GPUs that this process can open.
pub(super) fn num_gpus(host: &Host) -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    host.names("/dev").iter().filter(|name| is_gpu(name)).count()
}

pub(super) fn gpus(host: &Host) -> Finding {
    let slots = "/sys/bus/pci/devices";
    let is_gpu = |slot: &String| {
        let read = |file| host.text(format!("{slots}/{slot}/{file}"));
        read("vendor") == NVIDIA && read("class").starts_with(DISPLAY)
    };
    let num_built_in = host.names(slots).iter().filter(|slot| is_gpu(slot)).count();
    let version = driver(&host.text("/proc/driver/nvidia/version"));
    let major = version.as_deref().and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match (num_gpus(host), version, major) {
        (0, None, _) if num_built_in == 0 => Finding::ok("gpus", "none; processors compute"),
        (_, None, _) => Finding::broken(
            "gpus",
            format!("{num_built_in}, and no driver is loaded"),
            format!("install NVIDIA's driver, {MIN_DRIVER} or newer, until `nvidia-smi` lists the GPUs"),
        ),
        (_, Some(version), Some(major)) if major < MIN_DRIVER => Finding::broken(
            "gpus",
            format!("driver {version} cannot run CUDA 12"),
            format!("install driver {MIN_DRIVER} or newer"),
        ),
        (0, Some(version), _) => Finding::broken(
            "gpus",
            format!("driver {version}, and no GPU in /dev"),
            "start the container with --gpus all (NVIDIA's container toolkit), or ask for nvidia.com/gpu in the pod",
        ),
        (num_gpus, Some(version), _) => Finding::ok("gpus", format!("{num_gpus}, driver {version}")),
    }
}

/// The version in the text of the driver, such as "550.54.14".
fn driver(text: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// What GPUs and network devices need, if there are any.
pub(super) fn libraries(host: &Host, num_gpus: usize, num_fabric: usize) -> Vec<Finding> {
    let cuda = "install CUDA 12 or 13, or the wheel, and name it by";
    let wanted: [(bool, &str, &[&str], String); 5] = [
        (
            num_gpus > 0,
            "driver",
            &["libcuda.so.1"],
            "install the driver's libraries; a container gets them with \
            NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                .to_owned(),
        ),
        (
            num_gpus > 0,
            "cublaslt",
            &["libcublasLt.so.13", "libcublasLt.so.12"],
            format!("{cuda} BATON_CUBLASLT (nvidia-cublas-cu12)"),
        ),
        (
            num_gpus > 0,
            "nvrtc",
            &["libnvrtc.so.13", "libnvrtc.so.12"],
            format!(
                "{cuda} BATON_NVRTC (nvidia-cuda-nvrtc-cu12); \
            kernels.cubins beside the program does for common models"
            ),
        ),
        (
            num_gpus > 1,
            "nccl",
            &["libnccl.so.2"],
            "install NCCL, or the wheel nvidia-nccl-cu12, and name it by BATON_NCCL; \
            --tensor-parallel needs it"
                .to_owned(),
        ),
        (
            num_fabric > 0,
            "nixl",
            &["libnixl_capi.so"],
            "install the wheel nixl-cu12 and let BATON_NIXL name its folder .nixl_cu12.mesonpy.libs (in site-packages); \
            without it KV travels over TCP"
                .to_owned(),
        ),
    ];
    let folders = folders(host);
    let look = |(_, what, files, fix): (bool, &'static str, &[&str], String)| match find(&folders, files) {
        Some(path) => Finding::ok(what, path.display().to_string()),
        None => Finding::warning(what, format!("no {} in the usual places", files[0]), fix),
    };
    wanted.into_iter().filter(|(is_needed, ..)| *is_needed).map(look).collect()
}

/// Files that were named, and folders of libraries.
fn folders(host: &Host) -> Vec<PathBuf> {
    let asked = host.library_path.iter().flat_map(std::env::split_paths);
    let named = host.libraries.iter().cloned().chain(asked).map(|path| host.path(path));
    named.chain(FOLDERS.iter().map(|folder| host.path(folder))).collect()
}

fn find(places: &[PathBuf], files: &[&str]) -> Option<PathBuf> {
    let is_it = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.is_file() && name.is_some_and(|name| files.iter().any(|file| name.starts_with(file)))
    };
    files.iter().find_map(|file| {
        places.iter().flat_map(|place| [place.clone(), place.join(file)]).find(|path| is_it(path))
    })
}

/// Devices with RDMA, InfiniBand or RoCE.
pub(super) fn fabric(host: &Host) -> Vec<FabricDevice> {
    let class = "/sys/class/infiniband";
    let device = |name: String| {
        let (mut active, mut inactive) = (Vec::new(), Vec::new());
        for port in host.names(format!("{class}/{name}/ports")) {
            let read = |file| host.text(format!("{class}/{name}/ports/{port}/{file}"));
            // Such as "4: ACTIVE".
            let state = read("state").rsplit(' ').next().unwrap_or_default().to_lowercase();
            match state.as_str() {
                "active" => {
                    let rate = read("rate");
                    let rate = rate.split('(').next().unwrap_or_default().trim().replace("Gb/sec", "Gb/s");
                    active.push(format!(
                        "port {port} {} {rate}{}",
                        read("link_layer"),
                        roce(host, &name, &port)
                    ));
                }
                _ => inactive.push(format!("port {port} is {state}")),
            }
        }
        FabricDevice { name, active, inactive }
    };
    host.names(class).into_iter().map(device).collect()
}

/// The indices of GIDs that routers forward, on Ethernet.
fn roce(host: &Host, device: &str, port: &str) -> String {
    let types = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types");
    let mut indices: Vec<u32> = host
        .names(&types)
        .into_iter()
        .filter(|idx| host.text(format!("{types}/{idx}")) == "RoCE v2")
        .filter_map(|idx| idx.parse().ok())
        .collect();
    indices.sort_unstable();
    match indices.is_empty()
        || host.text(format!("/sys/class/infiniband/{device}/ports/{port}/link_layer")) != "Ethernet"
    {
        true => String::new(),
        false => {
            let indices: Vec<String> = indices.iter().map(u32::to_string).collect();
            format!(", RoCE v2 at GID index {}", indices.join(" or "))
        }
    }
}

pub(super) fn network(host: &Host, devices: &[FabricDevice]) -> Finding {
    if devices.is_empty() {
        return Finding::ok("rdma", "no device; KV travels between hosts over TCP");
    }
    let shown = |ports: fn(&FabricDevice) -> &Vec<String>| {
        let of_device = |device: &FabricDevice| {
            ports(device).iter().map(|port| format!("{} {port}", device.name)).collect::<Vec<_>>()
        };
        devices.iter().flat_map(of_device).collect::<Vec<_>>().join("; ")
    };
    let (active, inactive) = (shown(|device| &device.active), shown(|device| &device.inactive));
    let is_open = host.names("/dev/infiniband").iter().any(|name| name.starts_with("uverbs"));
    if !is_open {
        return Finding::broken(
            "rdma",
            format!("{} devices, and none in /dev/infiniband", devices.len()),
            "load ib_uverbs; give a container --device /dev/infiniband, or ask for the device plugin's resource in the pod",
        );
    }
    if active.is_empty() {
        return Finding::broken(
            "rdma",
            inactive,
            "look at cables and switches (`ibstat`); InfiniBand needs a subnet manager, RoCE an interface that is up",
        );
    }
    match inactive.is_empty() {
        true => Finding::ok("rdma", active),
        false => Finding::warning(
            "rdma",
            format!("{active}; {inactive}"),
            "if that port should work, look at its cable and switch; UCX_NET_DEVICES names the ports to use",
        ),
    }
}
