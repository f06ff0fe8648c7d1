//! Ports are taken before anything slow happens, so that a busy one is known at once.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Result, anyhow};
use tokio::net::TcpListener;

/// A port by the flag that names it.
#[derive(Clone, Copy, Debug)]
pub enum Port {
    Main,
    Admin,
}

/// Listens, or says which flag would help.
pub async fn bind(port: Port, host: IpAddr, number: u16) -> Result<TcpListener> {
    let (flag, variable, note) = match port {
        Port::Main => ("--port", "QUIRE_PORT", ""),
        Port::Admin => ("--admin-port", "QUIRE_ADMIN_PORT", ", or do without the admin port with --admin-port 0"),
    };
    let address = SocketAddr::new(host, number);
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            anyhow!("port {number} on {host} is in use by another process; choose another with {flag} (or {variable}){note}")
        }
        io::ErrorKind::PermissionDenied => {
            anyhow!("port {number} on {host} may not be used by this user; choose another with {flag}{note}")
        }
        io::ErrorKind::AddrNotAvailable => anyhow!("{host} is not an address of this machine (--host)"),
        _ => anyhow!("can't listen on {address} ({flag}): {error}"),
    })
}
