//! CUDA: is there a GPU that this binary can use?
//!
//! Owns the one question that may be asked on any machine. The bindings panic where the driver or one of its functions is
//! missing, so nothing else may call them before [`probe`] has said yes. Needs no CUDA toolkit, to build or to run.

use std::panic::catch_unwind;

use cudarc::driver::{result, sys};
use thiserror::Error;

/// Oldest driver whose interface the bindings are made for (CUDA 13.0), as `cuDriverGetVersion` counts.
pub const OLDEST_DRIVER: i32 = 13_000;

/// Why no GPU can be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unavailable {
    #[error("no NVIDIA driver on this machine")]
    NoDriver,
    #[error("the NVIDIA driver supports CUDA {}.{}; {}.{} or newer is needed", .found / 1000, .found % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10)]
    OldDriver { found: i32 },
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    #[error("the NVIDIA driver fails in {call}: {error}")]
    Failed { call: &'static str, error: String },
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its index, as CUDA counts.
    pub ordinal: i32,
    pub name: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Bytes of memory in all.
    pub memory: usize,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// As `cuDriverGetVersion` counts: 13010 is CUDA 13.1.
    pub driver_version: i32,
    /// At least one.
    pub devices: Vec<Device>,
}

/// Looks for a driver and its GPUs. Creates no context; doesn't panic, whatever the machine has.
///
/// # Errors
/// The reason why there is none that can be used.
pub fn probe() -> Result<Found, Unavailable> {
    // A damaged or much older driver may lack a function; the bindings panic then.
    catch_unwind(look).unwrap_or_else(|_| Err(Unavailable::Failed { call: "loading", error: "it lacks a function".into() }))
}

fn look() -> Result<Found, Unavailable> {
    // SAFETY: opens the driver's library, if there is one, and runs its initialisers, which is what this is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    let failed = |call| move |error: result::DriverError| Unavailable::Failed { call, error: format!("{:?}", error.0) };
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Unavailable::NoDevice,
        _ => failed("cuInit")(error),
    })?;
    let mut driver_version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_version) }.result().map_err(failed("cuDriverGetVersion"))?;
    if driver_version < OLDEST_DRIVER {
        return Err(Unavailable::OldDriver { found: driver_version });
    }
    let count = result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
    let devices = (0..count).map(device).collect::<Result<Vec<_>, _>>().map_err(failed("cuDeviceGet"))?;
    if devices.is_empty() { Err(Unavailable::NoDevice) } else { Ok(Found { driver_version, devices }) }
}

fn device(ordinal: i32) -> Result<Device, result::DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let handle = result::device::get(ordinal)?;
    // SAFETY: the handle comes from the driver.
    let (major, minor, memory) = unsafe {
        (result::device::get_attribute(handle, MAJOR)?, result::device::get_attribute(handle, MINOR)?, result::device::total_mem(handle)?)
    };
    Ok(Device { ordinal, name: result::device::get_name(handle)?, capability: (major, minor), memory })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_gives_devices_or_a_reason_on_any_machine() {
        let loaded = std::path::Path::new("/dev/nvidiactl").exists();
        match probe() {
            Ok(found) => {
                assert!(found.driver_version >= OLDEST_DRIVER);
                assert!(!found.devices.is_empty());
                assert!(found.devices.iter().all(|device| device.memory > 0 && device.capability.0 > 0));
            }
            Err(reason) => {
                // On Linux the device node exists where a driver is loaded.
                assert!(
                    !cfg!(target_os = "linux") || loaded || reason == Unavailable::NoDriver || reason == Unavailable::NoDevice,
                    "{reason}"
                );
                println!("no GPU here: {reason}");
            }
        }
        assert_eq!(probe(), probe());
    }

    #[test]
    fn reasons_read_well() {
        let old = Unavailable::OldDriver { found: 12_080 };
        assert_eq!(old.to_string(), "the NVIDIA driver supports CUDA 12.8; 13.0 or newer is needed");
    }
}
